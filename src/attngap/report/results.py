"""Find and read what the other verbs wrote: JSON files that name their schema, and SQLite files of runs."""

import dataclasses
import json
import re
import sqlite3
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
    "phase": (1, "attngap theory phase -o phase.json"),
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
        provenance = self.content.get("provenance")
        return str(provenance.get("time", "")) if isinstance(provenance, dict) else ""


@dataclasses.dataclass(frozen=True)
class Results:
    """Everything a report is made from."""

    results: Sequence[Result]
    runs: Sequence[tuple[Path, Sequence[Record]]] = ()
    skipped: Sequence[str] = ()  # a line for each file in a folder that looked like a result and could not be read

    def of(self, kind: str) -> list[Result]:
        return [result for result in self.results if result.kind == kind]


def read(places: Iterable[str | Path]) -> Results:
    """Every result in these folders (and one level below) and files; a folder without any is a mistake worth a line.

    A file named by itself must be a result. In a folder somebody else's file is passed over and named in `skipped`; one
    of ours that is damaged is a mistake all the same, since a report without it would look whole.
    """
    found: list[Result] = []
    runs: list[tuple[Path, Sequence[Record]]] = []
    skipped: list[str] = []
    for place in map(Path, places):
        here: list[Result] = []
        databases: list[tuple[Path, Sequence[Record]]] = []
        for path in _inside(place):
            try:
                if path.suffix == ".json":
                    here += [result] if (result := read_json(path)) else []
                elif records := read_runs(path):
                    databases.append((path, records))
            except Foreign as error:
                if path == place:
                    raise
                skipped.append(str(error))
        if not here and not databases:
            verbs = "; ".join(verb for _, verb in KINDS.values())
            why = f" ({skipped[-1]})" if skipped else ""
            raise AttngapError(f"No result in '{place}'{why}. Results are written by: {verbs}; attngap probe run TASK")
        found += here
        runs += databases
    unique = {result.path.resolve(): result for result in found}
    databases = list({path.resolve(): (path, rows) for path, rows in runs}.values())
    return Results(list(unique.values()), databases, skipped)


class Foreign(AttngapError):
    """A file that nobody here wrote, or that cannot be opened at all."""


def _inside(place: Path) -> list[Path]:
    if place.is_file():
        return [place]
    if not place.is_dir():
        raise AttngapError(f"'{place}' does not exist. Give a folder that attngap wrote, or a result file in it")
    found = {path for pattern in FILES for path in place.glob(pattern) if not path.name.startswith(".")}
    return sorted(path for path in found if path.is_file())  # a pipe would be waited for


def read_json(path: Path) -> Result | None:
    """The result in a JSON file; None for somebody else's JSON (a model's config lies beside a receipt)."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Foreign(f"Cannot read '{path}': {error}") from None
    try:
        content = json.loads(text)
    except RecursionError:
        raise Foreign(f"Cannot read '{path}': it is nested too deeply for a result") from None
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
    try:
        with Runs(path, readonly=True) as runs:
            return runs.records()
    except AttngapError as error:
        raise Foreign(str(error)) from None
    except (sqlite3.Error, ValueError, TypeError) as error:
        raise Foreign(f"'{path}' is not a run database as attngap writes it: {error}") from None
