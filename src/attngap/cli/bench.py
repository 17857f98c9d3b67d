"""`attngap bench`: how fast, how much memory, against whom."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attngap.cli.eval import parse_contexts
from attngap.errors import AttngapError, missing_extra

if TYPE_CHECKING:
    from rich.table import Table

QUICK, FULL = (512, 2048), (512, 2048, 8192, 32768)
QUICK_MECHANISMS, FULL_MECHANISMS = (256, 512, 1024), (256, 512, 1024, 2048, 4096, 8192)


COMPILED = "original, compiled products"
QUICK_CONTEXTS, QUICK_PROMPTS = "256,1024", "512"


def bench(
    folder: Annotated[
        Path | None, typer.Argument(help="Folder written by `attngap linearize`: measure its model instead of the ops.")
    ] = None,
    contexts: Annotated[str, typer.Option(help="Lengths at which FOLDER decodes.")] = "256,1024,4096,16384",
    prompts: Annotated[
        str, typer.Option(help="Lengths of prompts that FOLDER reads; minutes on a CPU at 16384.")
    ] = "512,1024,4096",
    quick: Annotated[bool, typer.Option("--quick", help="Short sequences only: a minute instead of many.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the records as JSON on stdout.")] = False,
) -> None:
    """Measure speed and memory: of the ops beside their peers, or of a converted model beside its original.

    Ops: 8 heads of width 64, float32, batch 1, causal, and from which length each mechanism beats softmax. Models:
    a token after so many others, and whole prompts, with what they would take without any attention. Ratios are
    within one run, both sides called in turns.

    \b
    Examples:
      attngap bench --quick
      attngap bench fast --prompts 1024,16384
      attngap bench --json > bench.json
    """
    if folder is not None:
        lengths = (QUICK_CONTEXTS, QUICK_PROMPTS) if quick else (contexts, prompts)
        records = measure_model(folder, *(parse_contexts(each) for each in lengths))
    else:
        records = measure(quick)
    if as_json:
        print(json.dumps(records, indent=2))
    elif folder is not None:
        _print_model(records)
    else:
        _print(records)


def measure_model(folder: Path, contexts: tuple[int, ...], prompts: tuple[int, ...]) -> list[dict[str, Any]]:
    """A converted model and its original."""
    if not (folder / "attngap.json").exists():
        raise AttngapError(f"No converted model in '{folder}'. Write one: attngap linearize MODEL -o {folder}")
    if min((*contexts, *prompts), default=1) < 1:
        raise AttngapError("Contexts and prompts are lengths of at least 1")
    from attngap.benchmark.model import model_speeds
    from attngap.models.load import load
    from attngap.models.products import compile_products
    from attngap.models.save import load_base, read_record
    from attngap.models.twin import twin
    from attngap.progress import progress

    records = []
    with progress("benchmark", 2 + len(contexts) + len(prompts)) as advance:
        models = {"original": load_base(folder, read_record(folder))[0].eval(), "converted": load(folder)[0].eval()}
        models[COMPILED] = twin(models["original"])  # what of the gain is not the conversion's
        compile_products(models[COMPILED])
        advance(note="models")
        for note, found in model_speeds(models, contexts, prompts):
            records.append(found)
            advance(note=note)
    return records


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
    console.print("window 64, window 256: hybrid attention with a window of so many tokens.", style="dim")
    console.print("times faster: how many times longer the peer takes than attngap.", style="dim")
    missing = {r["implementation"]: r["missing"] for r in records if "missing" in r}
    for name, reason in missing.items():
        console.print(f"{name}: {reason}", style="dim")
    console.print(_crossover_table([r for r in records if r["op"] == "crossover"]))


def _print_model(records: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(markup=False)
    table = Table("", box=None)
    for head in ("tokens", "original ms", "products compiled", "converted ms", "times as fast", "at most", "cache MB"):
        table.add_column(head, justify="right")
    for r in records[1:]:
        taken = [r["milliseconds"].get(name) for name in ("original", COMPILED, "converted")]
        times = ["" if x is None else f"{x:.4g}" for x in taken]
        held = [f"{r['cache_mb'][name]:.0f}" for name in ("original", "converted") if "cache_mb" in r]
        most = f"{r['times_as_fast_at_most']:.2f}" if "times_as_fast_at_most" in r else ""
        table.add_row(r["what"], f"{r['n']:,}", *times, f"{r['times_as_fast']:.2f}", most, " / ".join(held))
    console.print(table)
    weights = records[0]
    console.print(
        "products compiled: the original with the linear layers, gated MLPs and norms that a converted model has.",
        style="dim",
    )
    console.print(
        "at most: the original's time over what products compiled takes without its attention. No attention could "
        "gain more.",
        style="dim",
    )
    console.print(
        f"decode: one token after so many; prefill: a whole prompt, at once or in pieces, whichever is quicker for "
        f"each model. A token cannot take less than one read of the weights: {weights['mb']:.0f} MB, "
        f"{weights['milliseconds']:.1f} ms.",
        style="dim",
    )


def _ops_table(records: list[dict[str, Any]]) -> "Table":
    from rich.table import Table

    table = Table("op", "n", "implementation", box=None, title="forward, and forward + backward")
    for head in ("ms", "MB", "faster", "ms", "MB", "faster"):
        table.add_column(head, justify="right")
    rows: dict[tuple, dict[str, dict]] = {}
    for record in records:
        if "missing" not in record:
            op = record["op"] if record["op"] != "hybrid" else record["form"].partition(",")[0]  # by its window
            place = rows.setdefault((op, record["n"], record["implementation"]), {})
            place[record["direction"]] = record
    for (op, n, name), by_direction in rows.items():
        cells = []
        for direction in ("forward", "forward+backward"):
            record, ours = by_direction.get(direction), rows[op, n, "attngap"][direction]
            if record is None:
                cells += ["", "", ""]
                continue
            ratio = ours["ratios"].get(name)
            cells += [_brief(record["milliseconds"]), _brief(record["extra_mb"]), f"{ratio:.1f}" if ratio else ""]
        table.add_row(op, str(n), name, *cells)
    return table


def _brief(x: float) -> str:
    """In few places whatever its size, so that a table fits."""
    return f"{x:.0f}" if x >= 100 else f"{x:.3g}" if x >= 0.01 else f"{x:.3f}"


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
