"""`attngap mechanisms`: what there is to choose from."""

import inspect
import json
from typing import Annotated, Any

import typer

from attngap.cli import complete
from attngap.cli.facts import known, mechanism_names

DIM = 64
TOKENS = 4096  # where a state that grows is measured


def mechanisms(
    name: Annotated[
        str | None,
        typer.Argument(
            help="Show one: its formula, its options and their defaults.", autocompletion=complete.mechanisms
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
) -> None:
    """List the mechanisms: paper, size and rank of the state of one head at dim 64, what they learn.

    \b
    Examples:
      attngap mechanisms
      attngap mechanisms hedgehog
      attngap mechanisms --json
    """
    if name is not None:
        record = known().get(name) or describe(name)
        print(json.dumps(record, indent=2, default=repr)) if as_json else _print_one(record)
        return
    records = [known().get(each) or _describe_or_error(each) for each in mechanism_names()]
    print(json.dumps(records, indent=2, default=repr)) if as_json else _print_table(records)


def describe(name: str) -> dict[str, Any]:
    """Everything a mechanism claims about itself, for one head of width 64."""
    from attngap.mechanisms.catalogue import mechanism, mechanism_class

    cls = mechanism_class(name)
    m = mechanism(name, heads=1, dim=DIM)
    return {
        "name": name,
        "paper": m.paper,
        "dim": DIM,
        "tokens": TOKENS,
        "state_floats": m.state_floats(TOKENS),
        "state_rank": m.state_rank(TOKENS),
        "grows": m.state_floats(2 * TOKENS) > m.state_floats(TOKENS),
        "learned": m.learned,
        "gated": m.gated,
        "normalized": m.normalized,
        "formula": inspect.getdoc(cls) or "",
        "options": {p.name: p.default for p in inspect.signature(cls).parameters.values() if p.kind is p.KEYWORD_ONLY},
    }


def _describe_or_error(name: str) -> dict[str, Any]:
    """A broken plugin, whatever it raises, costs its own row only."""
    try:
        return describe(name)
    except Exception as error:
        return {"name": name, "error": f"{name}: {error}"}


def _print_table(records: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"One head, dim {DIM}", title_justify="left", box=None, pad_edge=False, header_style="bold")
    table.add_column("name", no_wrap=True)
    table.add_column("arXiv", no_wrap=True)
    table.add_column("state floats", justify="right", no_wrap=True)
    table.add_column("rank", justify="right", no_wrap=True)
    for column in ("learned", "gated", "normalized"):
        table.add_column(column, justify="center")
    sound = [r for r in records if "error" not in r]
    for r in sound:
        flags = ("yes" if r[key] else "-" for key in ("learned", "gated", "normalized"))
        table.add_row(r["name"], r["paper"], _floats(r), "tokens" if r["grows"] else f"{r['state_rank']:,}", *flags)
    console = Console(highlight=False, markup=False)
    console.print(table)
    for r in records:
        if "error" in r:
            console.print(r["error"], style="red", markup=False)
    console.print("\nOne in detail: attngap mechanisms NAME", markup=False)


def _print_one(record: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    console.print(f"{record['name']} (arXiv {record['paper']})", style="bold")
    paragraphs = record["formula"].split("\n\n")
    console.print("\n\n".join(" ".join(each.split()) for each in paragraphs), markup=False)
    rank = "one per token" if record["grows"] else record["state_rank"]
    console.print(f"\nState of one head at dim {DIM}: {_floats(record)} floats, rank {rank}", markup=False)
    options = ", ".join(f"{option}={default!r}" for option, default in record["options"].items())
    console.print(f"Options: {options or 'none'}", markup=False)


def _floats(record: dict[str, Any]) -> str:
    if record["grows"]:
        return f"{record['state_floats'] // TOKENS} per token"
    return f"{record['state_floats']:,}"
