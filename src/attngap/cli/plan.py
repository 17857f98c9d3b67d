"""`attngap plan`: choose how many heads keep softmax, on the curve of predicted damage."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from attngap.errors import unknown
from attngap.options import GRANULARITY, KEEP, Granularity

if TYPE_CHECKING:
    from attngap.models.plan import Plan

GRANULARITIES = ("head", "group")
LEVELS = (0.0, 0.02, 0.05, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0)


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
    """The curve at a few levels, the chosen one marked."""
    from rich.console import Console
    from rich.table import Table

    total = made.model.layers * made.model.heads
    curve = {point.kept: point for point in made.curve}
    chosen = len(made.keep) - (total - max(curve))  # heads that cannot be replaced are not on the curve
    levels = {min(curve, key=lambda kept, level=level: abs(kept - level * max(curve))) for level in LEVELS}
    table = Table(title=f"Predicted damage of keeping softmax on some of {max(curve)} heads")
    for name in ("kept", "share", "text, nats per token", "recall, nats per token"):
        table.add_column(name, justify="right")
    for kept in sorted(levels | {chosen}):
        point = curve[kept]
        style = "bold" if kept == chosen else None
        share = kept / max(1, max(curve))
        table.add_row(str(kept), f"{share:.0%}", f"{point.text:.4f}", f"{point.recall:.4f}", style=style)
    console = Console(markup=False)
    console.print(table)
    console.print("Single-head estimates, added up: errors interact, so measure after converting.", highlight=False)
    console.print(f"{output}: keeps {len(made.keep)} of {total} heads", highlight=False, soft_wrap=True)
