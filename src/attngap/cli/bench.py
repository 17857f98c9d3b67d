"""`attngap bench`: how fast, how much memory, against whom."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attngap.errors import missing_extra

if TYPE_CHECKING:
    from rich.table import Table

QUICK, FULL = (512, 2048), (512, 2048, 8192, 32768)
QUICK_MECHANISMS, FULL_MECHANISMS = (256, 512, 1024), (256, 512, 1024, 2048, 4096, 8192)


def bench(
    quick: Annotated[bool, typer.Option("--quick", help="Short sequences only: a minute instead of many.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the records as JSON on stdout.")] = False,
) -> None:
    """Measure speed and memory of the ops beside their peers, and from which length each mechanism beats softmax.

    8 heads of width 64, float32, batch 1, causal. Ratios are within one run, ours and peers called in turns.

    \b
    Examples:
      attngap bench --quick
      attngap bench --json > bench.json
    """
    records = measure(quick)
    print(json.dumps(records, indent=2)) if as_json else _print(records)


def measure(quick: bool) -> list[dict[str, Any]]:
    from attngap.benchmark.run import compare, crossovers, steps
    from attngap.mechanisms.catalogue import catalogue
    from attngap.progress import progress

    lengths, short = (QUICK, QUICK_MECHANISMS) if quick else (FULL, FULL_MECHANISMS)
    records: list[dict[str, Any]] = []
    with progress("benchmark", steps(lengths) + len(catalogue())) as advance:
        for parts in (compare(lengths), crossovers(short)):
            for note, found in parts:
                records += found
                advance(note=note)
    return records


def _print(records: list[dict[str, Any]]) -> None:
    from rich.console import Console

    from attngap.ops import native

    console = Console(markup=False)
    console.print(_ops_table([r for r in records if r["op"] not in ("mechanism", "crossover")]))
    if not native.available():
        console.print(str(missing_extra("attngap's compiled kernels need", "native")), style="dim", markup=False)
    console.print("times faster: how many times longer the peer takes than attngap.", style="dim")
    missing = {r["implementation"]: r["missing"] for r in records if "missing" in r}
    for name, reason in missing.items():
        console.print(f"{name}: {reason}", style="dim")
    console.print(_crossover_table([r for r in records if r["op"] == "crossover"]))


def _ops_table(records: list[dict[str, Any]]) -> "Table":
    from rich.table import Table

    table = Table("op", "n", "implementation", box=None, title="forward, and forward + backward")
    for head in ("ms", "MB", "faster", "ms", "MB", "faster"):
        table.add_column(head, justify="right")
    rows: dict[tuple, dict[str, dict]] = {}
    for record in records:
        if "missing" not in record:
            place = rows.setdefault((record["op"], record["n"], record["implementation"]), {})
            place[record["direction"]] = record
    for (op, n, name), by_direction in rows.items():
        cells = []
        for direction in ("forward", "forward+backward"):
            record, ours = by_direction[direction], rows[op, n, "attngap"][direction]
            ratio = ours["ratios"].get(name)
            cells += [f"{record['milliseconds']:.3g}", f"{record['extra_mb']:.3g}", f"{ratio:.1f}" if ratio else ""]
        table.add_row(op, str(n), name, *cells)
    return table


def _crossover_table(records: list[dict[str, Any]]) -> "Table":
    from rich.table import Table

    table = Table("mechanism", box=None, title="against softmax (SDPA), forward")
    table.add_column("faster from", justify="right")
    table.add_column("time grows as n^", justify="right")
    table.add_column("softmax as n^", justify="right")
    for record in records:
        start = f"{record['n']} tokens" if record["n"] else f"not by {record['measured_to']}"
        table.add_row(record["form"], start, f"{record['growth']:.2f}", f"{record['sdpa_growth']:.2f}")
    return table
