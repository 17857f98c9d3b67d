"""How an estimate shows itself: the same tables in a terminal and in a notebook."""

from html import escape
from typing import TYPE_CHECKING

from attngap.charts.inline import Grid

if TYPE_CHECKING:
    from attngap.costs.estimate import Estimate


def headline(found: "Estimate") -> str:
    left = "" if found.available is None else f", {_size(found.available)} left here"
    where = f"{found.dtype} on {found.device}" + (f", {found.workers} workers" if found.workers > 1 else "")
    return (
        f"{found.model}: {found.parameters / 1e9:.2f}B parameters, {found.layers} layers of {found.heads} heads; "
        f"{where}: {_size(found.weights)} of weights{left}"
    )


def tables(found: "Estimate") -> list[Grid]:
    """What each verb takes, and what a conversion would gain at each length."""
    costs = [
        (verb, time_of(cost.seconds), _size(cost.memory), _size(cost.beyond), _size(cost.disk))
        for verb, cost in (("diagnose", found.diagnose), ("linearize", found.linearize))
    ]
    gains = [
        (
            f"{each.context:,}",
            _size(each.cache),
            _size(each.converted_cache),
            f"{each.token_seconds:.3g} s",
            f"{each.converted_token_seconds:.3g} s",
            f"{each.token_seconds / each.converted_token_seconds:.2f}x",
        )
        for each in found.gains
    ]
    kept = f"With {found.keep:.0%} of the heads kept, by what decoding must read"
    return [
        Grid("What it takes", ("verb", "time", "memory", "beyond the weights", "disk"), costs),
        Grid(kept, ("tokens", "cache", "converted", "a token reads", "converted", "faster"), gains),
    ]


def show(found: "Estimate") -> None:
    """Print it."""
    from rich.console import Console

    console = Console(markup=False, highlight=False)
    console.print(headline(found), soft_wrap=True)
    for table in tables(found):
        console.print(table.rich())
    for note in found.notes:
        console.print(note, soft_wrap=True)


def to_html(found: "Estimate") -> str:
    notes = "".join(f"<li>{escape(note)}</li>" for note in found.notes)
    grids = "".join(table.html() for table in tables(found))
    return f"<div><p><b>{escape(headline(found))}</b></p>{grids}{f'<ul>{notes}</ul>' if notes else ''}</div>"


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def time_of(seconds: float) -> str:
    """In the unit that a person would say it in.

    >>> [time_of(x) for x in (42.0, 600.0, 36000.0, 900000.0)]
    ['42 s', '10 min', '10.0 h', '10.4 days']
    """
    for limit, unit, name in ((120, 1, "s"), (7200, 60, "min")):
        if seconds < limit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds / 3600:.1f} h" if seconds < 172800 else f"{seconds / 86400:.1f} days"
