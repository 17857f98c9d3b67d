"""How `attngap theory` prints: tables for people, JSON for programs."""

import json
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attngap.theory.statements import Outcome

SURE = -300 * math.log(10)  # below this a probability is printed by its exponent


def emit(record: dict[str, Any]) -> None:
    """JSON with where it came from; infinities become null, which JSON has."""
    from attngap.provenance import provenance

    print(json.dumps(_plain(record | {"provenance": provenance()}), indent=2, allow_nan=False))


def _plain(x: Any) -> Any:
    if isinstance(x, dict):
        return {key: _plain(value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return [_plain(value) for value in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x


def show_law(records: list[dict[str, Any]]) -> None:
    console, table = _table("", *(r["kernel"] for r in records))
    first = records[0]
    rows = {
        "needle weight, its row": lambda r: f"{r['mass']['needle_row']:.4g}",
        "needle weight, others": lambda r: f"{r['mass']['other_rows']:.4g}",
        "q0, fires on D0": lambda r: _probability(r["log_q0"]),
        "q1, fires on D1": lambda r: _probability(r["log_q1"]),
        "q01, fires on either": lambda r: _probability(r["log_q01"]),
        "success": lambda r: _probability(r["log_success"]),
        "failure": lambda r: _probability(r["log_failure"]),
        "best m": lambda r: f"{r['best_m']:,}" if math.isfinite(r["best_m"]) else "unbounded",
        "critical needle, d big": lambda r: _or_none(r["critical_needle"], "none to 4"),
    }
    if "wanted" in first:
        rows |= {
            f"needle for {first['wanted']['success']:g}": lambda r: _or_none(r["wanted"]["needle"], "none to 4"),
            f"smallest d for {first['wanted']['success']:g}": lambda r: f"{r['wanted']['d'] or 'none'}",
        }
    for name in ("D0", "D1") if "distribution" in first else ():
        rows |= {
            f"F on {name}, mean": lambda r, name=name: f"{r['distribution'][name]['mean']:.4g}",
            "  deviation" + " " * (name == "D1"): lambda r, name=name: f"{r['distribution'][name]['std']:.4g}",
            "  P(F = 0)" + " " * (name == "D1"): lambda r, name=name: f"{r['distribution'][name]['zero']:.4g}",
        }
    if "certified" in first:
        rows |= {
            "certified success": lambda r: r["certified"]["digits"],
            "width of its enclosure": lambda r: f"{r['certified']['width']:.1e}",
        }
    for label, show in rows.items():
        table.add_row(label.rstrip(), *(show(r) for r in records))
    shared = f"n = {first['n']:,}, d = {first['d']}, m = {first['m']}, a0 = {first['a0']:g}, a1 = {first['a1']:g}"
    console.print(f"{shared}, b = {first['b']:g}, scale = {first['scale']:g}")
    console.print(table)
    if "distribution" in first:
        console.print("F in units of sqrt(log n)")
    if any(r["kernel"] == "linear" for r in records):
        console.print("linear: for the weight X = 11^T. Another weight separates: --kernel tilted:2")


def show_outcome(outcome: "Outcome") -> None:
    console, _ = _table()
    mark = "ok  " if outcome.holds else "FAIL"
    kind = "counterexample: " if outcome.statement.counterexample else ""
    line = f"{mark} {outcome.statement.number:<4} {kind}{outcome.statement.claim}: {outcome.evidence}"
    console.print(line, markup=False, soft_wrap=True)


def show_capacity(record: dict[str, Any]) -> None:
    console, table = _table("load", "pairs", *(f"{kind} keys" for kind in record["curves"]))
    curves = list(record["curves"].values())
    for i, row in enumerate(curves[0]):
        table.add_row(f"{row['load']:g}", str(row["count"]), *(f"{c[i]['recall']:.3f}" for c in curves))
    title = f"rank {record['rank']}, value width {record['value_dim']}, {record['vocabulary']:,} codes"
    console.print(f"{title}: about half of {record['half']:.0f} pairs are recalled")
    console.print(table)
    console.print("Load 1 is that number. For gaussian keys about 0.97 at 0.25, about 0.5 at 1:")
    console.print("an empirical law, not a bound")


def show_thresholds(rows: list[dict[str, Any]], limits: dict[str, float]) -> None:
    lengths = list(dict.fromkeys(row["n"] for row in rows))
    console, table = _table("mechanism", *(f"n = {n}" for n in lengths), "note")
    for label in dict.fromkeys(row["label"] for row in rows):
        mine = {row["n"]: row for row in rows if row["label"] == label}
        one = mine[lengths[0]]
        notes = [text for text, said in (("fitted", one["fitted"]), ("rows rescaled", one["rescaled"])) if said]
        shown = ("-" if mine[n]["needle"] is None else f"{mine[n]['needle']:.3f}" for n in lengths)
        table.add_row(label, *shown, ", ".join(notes))
    table.add_row("softmax, d large", *(f"{limits[str(n)]:.3f}" for n in lengths), "the law")
    console.print("smallest needle that separates, - none up to 2; softmax tends to 0.618")
    console.print(table)


def _table(*columns: str) -> tuple[Any, Any]:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", no_wrap=True)
    return Console(highlight=False, markup=False), table


def _probability(log: float) -> str:
    if log == -math.inf:
        return "0"
    return f"{math.exp(log):.6g}" if log > SURE else f"10^{log / math.log(10):.1f}"


def _or_none(x: float, otherwise: str) -> str:
    return f"{x:.4f}" if math.isfinite(x) else otherwise
