"""Find and read what the other verbs wrote: JSON files that name their schema, and SQLite files of runs."""

import dataclasses
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from attngap.errors import AttngapError
from attngap.storage.runs import Record, Runs

# What a file says it is ("attngap.diagnosis/1"), the newest version read here, and the verb that writes it.
KINDS = {
    "diagnosis": (1, "attngap diagnose MODEL -o DIR"),
    "plan": (1, "attngap plan DIR -o plan.json"),
    "receipt": (1, "attngap eval DIR"),
    "phase": (1, "attngap theory phase --json -o phase.html > phase.json"),
    "samples": (1, "attngap demo"),
}
FILES = ("*.json", "*/*.json", "*.sqlite", "*/*.sqlite", "*.db", "*/*.db")
SCHEMA = re.compile(r"attngap\.([a-z]+)/(\d+)")


@dataclasses.dataclass(frozen=True)
class Result:
    """One file: what it is, where it lies, what it says."""

    kind: str
    path: Path
    content: dict[str, Any]

    @property
    def model(self) -> str:
        model = self.content.get("model")
        return str(model.get("name", "")) if isinstance(model, dict) else str(model or "")

    @property
    def time(self) -> str:
        return str(self.content.get("provenance", {}).get("time", ""))


@dataclasses.dataclass(frozen=True)
class Results:
    """Everything a report is made from."""

    results: Sequence[Result]
    runs: Sequence[tuple[Path, Sequence[Record]]] = ()

    def of(self, kind: str) -> list[Result]:
        return [result for result in self.results if result.kind == kind]


def read(places: Iterable[str | Path]) -> Results:
    """Every result in these folders (and one level below) and files; a folder without any is a mistake worth a line."""
    found: list[Result] = []
    runs: list[tuple[Path, Sequence[Record]]] = []
    for place in map(Path, places):
        paths = _inside(place)
        here = [result for path in paths if path.suffix == ".json" and (result := read_json(path))]
        databases = [(path, records) for path in paths if path.suffix != ".json" and (records := read_runs(path))]
        if not here and not databases:
            verbs = "; ".join(verb for _, verb in KINDS.values())
            raise AttngapError(f"No result in '{place}'. Results are written by: {verbs}; attngap probe run TASK")
        found += here
        runs += databases
    unique = {result.path.resolve(): result for result in found}
    return Results(list(unique.values()), list({path.resolve(): (path, rows) for path, rows in runs}.values()))


def _inside(place: Path) -> list[Path]:
    if place.is_file():
        return [place]
    if not place.is_dir():
        raise AttngapError(f"'{place}' does not exist. Give a folder that attngap wrote, or a result file in it")
    return sorted({path for pattern in FILES for path in place.glob(pattern) if not path.name.startswith(".")})


def read_json(path: Path) -> Result | None:
    """The result in a JSON file; None for somebody else's JSON (a model's config lies beside a receipt)."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise AttngapError(f"Cannot read '{path}': {error}") from None
    try:
        content = json.loads(text)
    except ValueError as error:
        if not SCHEMA.search(text[:4096]):
            return None
        raise AttngapError(
            f"'{path}' is cut off or damaged: {error}. Run the command that wrote it again: it resumes"
        ) from None
    named = SCHEMA.fullmatch(str(content.get("schema", ""))) if isinstance(content, dict) else None
    if named is None or named[1] not in KINDS:
        return None
    kind, version = named[1], int(named[2])
    newest, _ = KINDS[kind]
    if version > newest:
        raise AttngapError(
            f"'{path}' has schema {content['schema']}, this attngap reads up to attngap.{kind}/{newest}. "
            "Next: pip install --upgrade attngap"
        )
    return Result(kind, path, content)


def read_runs(path: Path) -> Sequence[Record]:
    with Runs(path, readonly=True) as runs:
        return runs.records()
