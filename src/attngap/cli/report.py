"""`attngap report`: one page from saved results."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from attngap.storage.files import write_atomically


def report(
    places: Annotated[list[Path], typer.Argument(help="Folders that attngap wrote, or files in them.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The page to write.")] = Path("report.html"),
    title: Annotated[str | None, typer.Option(help="Title of the page; the model's name if none.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was written as JSON.")] = False,
) -> None:
    """Make one self-contained page from any mix of diagnosis, plan, receipt, probe and theory results.

    \b
    Example:
      attngap report diagnosis converted -o report.html
    """
    from attngap.report.build import report_page
    from attngap.report.results import read

    results = read(places)
    size = write_page(output, report_page(results, title=title))
    for line in results.skipped:
        print(f"passed over: {line}", file=sys.stderr)
    used = [str(result.path) for result in results.results] + [str(path) for path, _ in results.runs]
    if as_json:
        print(json.dumps({"report": str(output), "bytes": size, "results": used}))
    else:
        print(f"{output}: {size / 1e6:.1f} MB from {len(used)} result{'s' if len(used) != 1 else ''}")


def write_page(path: Path, html: str) -> int:
    """Write whole or not at all; the size in bytes."""
    data = html.encode()
    write_atomically(path, lambda draft: draft.write_bytes(data), hint="Choose another place with -o")
    return len(data)
