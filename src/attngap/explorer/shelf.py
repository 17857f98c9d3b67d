"""The stored results below some folders, and how far running sweeps have come."""

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from attngap.errors import AttngapError
from attngap.report.build import report_page
from attngap.report.results import read, read_json
from attngap.report.sections.plan import figures
from attngap.storage.runs import Runs

MAX_FOLDERS_BELOW = 3  # folders below the given ones that are searched
SKIPPED = {"node_modules", "site-packages", "__pycache__"}


class Shelf:
    """Lists results and opens them by number, so that no path ever comes from a request."""

    def __init__(self, folders: list[Path]):
        self.folders = folders
        self._shown: list[Path] = []

    def listing(self) -> list[dict[str, Any]]:
        """One row per result; a file that cannot be read is listed with its fault instead of hiding the others."""
        rows = []
        for path in self._files(".json"):
            try:
                result = read_json(path)
            except AttngapError as error:
                rows.append({"kind": "unreadable", "model": str(error), "time": "", "path": str(path)})
                continue
            if result:
                rows.append(
                    {
                        "kind": result.kind,
                        "model": result.model,
                        "time": result.time[:16].replace("T", " "),
                        "path": str(path),
                    }
                )
        rows += [{"kind": "probe runs", "model": "", "time": "", "path": str(path)} for path in self._databases()]
        for row in rows:
            row["number"] = self._number(Path(row["path"]))
        return rows

    def sweeps(self) -> list[dict[str, Any]]:
        rows = []
        for path in self._databases():
            try:
                with Runs(path, readonly=True) as runs:
                    for sweep in runs.progress():
                        counts = {"done": sweep.done, "failed": sweep.failed, "total": sweep.total, "last": sweep.last}
                        rows.append({"sweep": sweep.sweep, **counts, "path": str(path)})
            except (AttngapError, sqlite3.Error) as error:
                rows.append({"sweep": f"unreadable: {error}", "path": str(path)})
        return rows

    def verdicts(self, config: Any) -> dict[str, str]:
        """Verdict by head of the latest diagnosis below the folders that fits the loaded model; empty if none does."""
        latest = self._latest("diagnosis", config)
        return {head["id"]: head["verdict"] for head in latest["heads"]} if latest else {}

    def plan(self, config: Any = None) -> dict[str, Any] | None:
        """The latest plan that predicts what other shares cost, of the loaded model if there is one."""
        return self._latest("plan", config, lambda content: bool(figures(content)))

    def _latest(self, kind: str, config: Any, holds: Callable[[Any], bool] = bool) -> dict[str, Any] | None:
        found: list[tuple[str, int, dict[str, Any]]] = []
        for place, path in enumerate(self._files(".json")):
            try:
                result = read_json(path)
                if result is None or result.kind != kind:
                    continue
                if (config is None or _fits(result.content["model"], config)) and holds(result.content):
                    found.append((result.time, place, result.content))
            except (AttngapError, LookupError, TypeError, AttributeError):
                continue  # listed as unreadable already
        return max(found)[2] if found else None

    def report(self, number: int) -> str:
        """The report of one listed result, as `attngap report` writes it."""
        if not 0 <= number < len(self._shown):
            raise AttngapError(f"No result number {number}. Go back to the list")
        path = self._shown[number]
        return report_page(read([path.parent if path.suffix == ".json" else path]))

    def _number(self, path: Path) -> int:
        if path not in self._shown:
            self._shown.append(path)
        return self._shown.index(path)

    def _databases(self) -> list[Path]:
        found = []
        for path in [*self._files(".sqlite"), *self._files(".db")]:
            try:
                Runs(path, readonly=True).close()
                found.append(path)
            except AttngapError:
                continue  # somebody else's database
        return found

    def _files(self, suffix: str) -> Iterator[Path]:
        for folder in self.folders:
            yield from sorted(_walk(folder, suffix, MAX_FOLDERS_BELOW))


def _fits(model: dict[str, Any], config: Any) -> bool:
    """Is a result about a model of this shape?"""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    shape = (getattr(text, "num_hidden_layers", None), getattr(text, "num_attention_heads", None))
    return (model["layers"], model["heads"]) == shape and model["architecture"] in (config.architectures or [])


def _walk(folder: Path, suffix: str, depth: int) -> Iterator[Path]:
    try:
        entries = list(folder.iterdir())
    except OSError:
        return  # a folder that may not be read has nothing to show
    for entry in entries:
        if entry.name.startswith(".") or entry.name in SKIPPED or entry.is_symlink():
            continue
        if entry.is_dir() and depth:
            yield from _walk(entry, suffix, depth - 1)
        elif entry.suffix == suffix and entry.is_file():
            yield entry
