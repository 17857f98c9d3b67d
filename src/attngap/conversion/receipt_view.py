"""How a receipt shows itself: the same tables in a terminal and in a notebook, where a small picture joins them."""

from html import escape
from typing import TYPE_CHECKING

from attngap.charts.frame import BLUE
from attngap.charts.inline import Grid, bars, number
from attngap.conversion.quality import STATES, is_of_states

if TYPE_CHECKING:
    from attngap.conversion.receipt import Entry, Receipt


def headline(receipt: "Receipt") -> str:
    share = receipt.kept / receipt.heads
    return (
        f"{receipt.model}: {receipt.kept} of {receipt.heads} heads keep softmax ({share:.0%}), "
        f"{receipt.kept_groups} of {receipt.groups} key heads keep their cache"
    )


def reading(receipt: "Receipt") -> list[str]:
    """What replaced heads read exactly, and what computed the rest when it was measured; as far as a receipt says."""
    near = f"Replaced heads read exactly {receipt.exact_tokens()}" if receipt.options.get("window") else ""
    named = receipt.provenance.get("far_part")
    return [each for each in (near, f"Far keys are read by {named}" if named else "") if each]


def tables(receipt: "Receipt") -> list[Grid]:
    """Quality beside original and baselines, then speed and memory where they were measured."""
    found = _grids("Quality on held-out text", receipt, receipt.options.get("context"))
    for entry in receipt.entries:
        found += _grids(f"Measured {entry.time[:10]} on {entry.text}", entry, receipt.options.get("context"))
    return found


def _grids(title: str, measured: "Receipt | Entry", context: int | None) -> list[Grid]:
    at = f", passages of {context:,} tokens" if context else ""
    quality = [_quality(f"{title}{at}", measured)] if measured.quality else []
    lengths = [_lengths(title, measured)] if measured.by_length else []
    return [*quality, *lengths, *([_speed(measured)] if any(measured.speed.values()) else [])]


def show(receipt: "Receipt") -> None:
    """Print it."""
    from rich.console import Console

    console = Console(markup=False, highlight=False)
    console.print(headline(receipt))
    for table in tables(receipt):
        console.print(table.rich())
    for line in reading(receipt):
        console.print(line)
    for note in receipt.notes:
        console.print(f"Note: {note}")


def to_html(receipt: "Receipt") -> str:
    """For a notebook: the headline, how far each model is from the original, and the tables."""
    apart = {name: quality.divergence for name, quality in receipt.quality.items() if quality.divergence}
    picture = f"<p>Divergence from the original:</p>{bars(apart, '.4f', BLUE)}" if apart else ""
    notes = "".join(f"<li>{escape(note)}</li>" for note in receipt.notes)
    grids = "".join(table.html() for table in tables(receipt))
    said = "".join(f"<p>{escape(line)}</p>" for line in reading(receipt))
    below = f"{said}{f'<ul>{notes}</ul>' if notes else ''}"
    return f"<div><p><b>{escape(headline(receipt))}</b></p>{picture}{grids}{below}</div>"


def _quality(title: str, receipt: "Receipt | Entry") -> Grid:
    if is_of_states(receipt.quality):
        return Grid(title, ("", STATES), [(name, f"{found.divergence:.4f}") for name, found in receipt.quality.items()])
    rows = [
        (
            name,
            number(found.perplexity, ".2f"),
            number(found.perplexity_ratio, ".4f"),
            f"{found.divergence:.4f}",
            number(found.induction, ".1%"),
            number(found.needle, ".1%"),
        )
        for name, found in receipt.quality.items()
    ]
    return Grid(title, ("", "perplexity", "ratio", "KL", "induction", "needle"), rows)


def _lengths(title: str, receipt: "Receipt | Entry") -> Grid:
    rows = [
        (
            row.part,
            f"{row.length:,}",
            number(row.perplexity_ratio, ".4f"),
            number(row.divergence, ".4f"),
            number(row.needle, ".0%"),
            number(row.repetition, ".0%"),
        )
        for row in receipt.by_length
    ]
    header = ("", "tokens", "ratio", "KL", "digits recalled", "repeated")
    # A column that nothing was measured for would take the others their room.
    shown = len(header) if any(row.repetition is not None for row in receipt.by_length) else len(header) - 1
    return Grid(f"{title}, last tokens", header[:shown], [row[:shown] for row in rows])


def _speed(receipt: "Receipt | Entry") -> Grid:
    before, after = receipt.speed.values()
    rows = [
        (
            str(a.context),
            f"{number(a.prefill, '.0f')} / {number(b.prefill, '.0f')}",
            f"{a.decode:.1f} / {b.decode:.1f}",
            f"{a.cache_bytes / 1e6:.1f} / {b.cache_bytes / 1e6:.1f}",
            f"{b.cache_bytes / a.cache_bytes:.0%}",
        )
        for a, b in zip(before, after, strict=True)
    ]
    header = ("context", "prefill", "decode", "cache MB", "cache share")
    return Grid("Tokens per second and cache, original / converted", header, rows)
