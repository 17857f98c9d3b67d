"""`attngap plan`: choose how many heads keep softmax, on the curve of predicted damage."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from attngap.errors import unknown
from attngap.options import GRANULARITY, KEEP, Granularity

if TYPE_CHECKING:
    from attngap.models.plan import Expected, Plan

GRANULARITIES = ("head", "group")


def plan(
    directory: Annotated[Path, typer.Argument(help="Folder written by `attngap diagnose`.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The plan to write.")] = Path("plan.json"),
    keep: Annotated[float, typer.Option(help="Share of heads that keep softmax, 0 to 1.")] = KEEP,
    granularity: Annotated[
        str, typer.Option(help="Keep single heads, or whole key-head groups: head, group.")
    ] = GRANULARITY,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON on stdout.")] = False,
) -> None:
    """Write which heads keep softmax and which are replaced, with the damage predicted for every other choice.

    \b
    Example:
      attngap plan diagnosis --keep 0.1 -o plan.json
    """
    units = read_granularity(granularity)
    from attngap.diagnosis.result import Diagnosis

    made = signed(Diagnosis.load(directory).plan(keep, units))
    made.save(output)
    if as_json:
        print(made.model_dump_json(by_alias=True))
    else:
        show(made, output)


def signed(made: "Plan") -> "Plan":
    """With the command and the time that it was made at, beside those of its diagnosis."""
    from attngap.provenance import provenance

    return made.model_copy(update={"provenance": provenance(**made.provenance)})


def read_granularity(text: str) -> Granularity:
    if text not in GRANULARITIES:
        raise unknown("granularity", text, GRANULARITIES)
    return cast(Granularity, text)


def show(made: "Plan", output: Path) -> None:
    """The curve at a few levels, the chosen one marked and said."""
    from rich.console import Console

    from attngap.report.sections.plan import chosen_point, levels, said

    total = made.model.layers * made.model.heads
    content = made.model_dump()
    point = chosen_point(content)
    counts = [each.kept for each in made.curve]
    console = Console(markup=False)
    console.print(_table(made, levels(counts, point["kept"]), point["kept"]))
    if point["perplexity_ratio"] or point["recalled"]:
        console.print(said(point, max(counts)), highlight=False)
    console.print(_meaning(made), highlight=False)
    console.print(f"{output}: keeps {len(made.keep)} of {total} heads", highlight=False, soft_wrap=True)


def _table(made: "Plan", levels: list[int], chosen: int) -> Any:
    from rich import box
    from rich.table import Table

    curve = {point.kept: point for point in made.curve}
    most = max(curve)
    table = Table(title=f"Keeping softmax on some of {most} heads", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("kept", "share", "perplexity (90% interval)", "recall kept", "text", "recall"):
        table.add_column(name, justify="right", no_wrap=True)
    for kept in levels:
        point = curve[kept]
        cells = [_interval(point.perplexity_ratio, ".3f", "x"), _interval(point.recalled, ".0%", "")]
        cells += [f"{point.text:.4f}", f"{point.recall:.4f}"]
        table.add_row(str(kept), f"{kept / max(1, most):.0%}", *cells, style="bold" if kept == chosen else None)
    return table


def _interval(expected: "Expected | None", form: str, unit: str) -> str:
    if expected is None:
        return "-"
    return f"{expected.value:{form}}{unit} ({expected.low:{form}}-{expected.high:{form}})"


def _meaning(made: "Plan") -> str:
    if not max(point.kept for point in made.curve):
        return f"No head of this model can be replaced. Why: attngap linearize {made.model.name} -o NEW"
    if all(point.perplexity_ratio is None for point in made.curve):
        return (
            "Text and recall are nats per token, single heads added up. This diagnosis replaced no heads together, so "
            "nothing is predicted: diagnose again, with text enough, or measure after converting."
        )
    return (
        "Perplexity is relative to the original, recall the share of its predictions on a repeated sequence: predicted "
        "from a few joint replacements by the quick fits of the diagnosis; a conversion fits longer. Text and recall "
        "are nats per token, single heads added up."
    )
