"""Runs as a flat table for other tools."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attngap.errors import AttngapError
from attngap.storage.runs import Record


def flatten(record: Record) -> dict[str, Any]:
    """One run as one row: options as table.key columns, the curve left out."""
    row: dict[str, Any] = {"key": record.key, "finished": record.finished}
    for name, value in record.spec.items():
        if isinstance(value, dict):
            row |= {f"{name}.{key}": entry for key, entry in value.items()}
        else:
            row[name] = value
    row |= {name: value for name, value in record.result.items() if name != "curve"}
    return row | {"commit": record.provenance.get("commit"), "time": record.provenance.get("time")}


def write_csv(records: Sequence[Record], path: str | Path) -> None:
    """Columns are those of all runs together; a run without one leaves it empty."""
    rows = [flatten(record) for record in records]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    try:
        with Path(path).open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)
    except OSError as error:
        raise AttngapError(f"Cannot write '{path}': {error.strerror or error}. Choose another file") from error


def _cell(value: Any) -> Any:
    """A spreadsheet must not run what begins like a formula."""
    text = value if isinstance(value, str) else ""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else value
