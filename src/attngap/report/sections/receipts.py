"""What a receipt says, in the forms that sections share: rows by length, the headline numbers, the limit."""

import math
from collections.abc import Sequence
from typing import Any

from attngap.conversion.options import exact_tokens
from attngap.report.page import Column, Fact
from attngap.report.results import Result

Row = dict[str, Any]
FEATURELESS = "without features"
SAME: dict[str, str] = {"sinks + window only": FEATURELESS}  # one thing, one name on the page
HELD_OUT = "held out of the calibration text"
NEARLY = 0.98  # features that take off less than this share of the divergence add nothing to speak of


def measurements(content: Row) -> list[tuple[str, list[Row]]]:
    """What was read, and the rows by length: the conversion's own figures, then those that `attngap eval` added."""
    later = [
        (f"{entry['text']}, {entry['time'][:10]}", by_length(content | entry)) for entry in content.get("entries") or []
    ]
    return [(HELD_OUT, by_length(content)), *later]


def by_length(content: Row) -> list[Row]:
    """Rows of length, part and whatever was measured; a receipt from before there were lengths has one or two."""
    if rows := content.get("by_length"):
        return sorted(rows, key=lambda row: row["length"])
    return fitted(content)


def fitted(content: Row) -> list[Row]:
    """The same for the passages of the length that replacements were fitted at."""
    found: dict[tuple[int, str], Row] = {}
    fitted = int(content["options"].get("context") or 0)
    for name, values in content["quality"].items():
        part = SAME.get(name) or name
        row = found.setdefault((fitted, part), {"length": fitted, "part": part})
        row |= {key: values.get(key) for key in ("perplexity", "perplexity_ratio")}
        # An encoder predicts nothing: its figure is how far its states are from the original's.
        row["state_error" if values.get("perplexity") is None else "divergence"] = values.get("divergence")
        row["repetition"] = values.get("induction")
        places: dict[int, list[float]] = {}
        for place, share in (values.get("needle_by_place") or {}).items():
            places.setdefault(int(place.split("@")[0]), []).append(share)
        for length, shares in places.items():
            row = found.setdefault((length, part), {"length": length, "part": part})
            row["needle"] = sum(shares) / len(shares)
    return sorted(found.values(), key=lambda row: row["length"])


def at_longest(content: Row, key: str) -> tuple[int, Row] | None:
    """The longest length within the model's positions at which original and conversion have this figure, and it by
    part."""
    limit = content.get("positions") or math.inf
    rows = [row for row in by_length(content) if row.get(key) is not None and row["length"] <= limit]
    rows = rows or [row for row in fitted(content) if row.get(key) is not None]  # what was measured there only
    for length in sorted({row["length"] for row in rows}, reverse=True):
        here = {row["part"]: row[key] for row in rows if row["length"] == length}
        if {"original", "converted"} <= set(here):
            return length, here
    return None


def limit(content: Row) -> str | None:
    """Up to which length the figures hold, and what replaced heads read beyond; None if nothing is known."""
    options = content["options"]
    if not options.get("window"):
        return None
    near = f"the first {options['sinks']} and {exact_tokens(options, content.get('windows') or {})}"
    if options.get("context") and _cut_off(content):
        return f"Beyond {options['context']:,} tokens replaced heads read {near} only."
    if useless := _without_use(content):
        return f"From {useless:,} tokens on replaced heads do no better than with {near} only."
    measured = max((row["length"] for row in by_length(content)), default=0)
    return f"Quality was measured up to {measured:,} tokens; nothing is claimed beyond." if measured else None


def _cut_off(content: Row) -> bool:
    """Do features end at the length they were fitted at? So they all did before conversions were for a length."""
    said = any("replaced heads read sinks and window only" in note for note in content.get("notes") or [])
    return said or "length" not in content["options"]


def _without_use(content: Row) -> int | None:
    """From which measured length on features add nothing to speak of."""
    rows = [row for row in by_length(content) if row.get("divergence") is not None]
    helped = {}
    for length in sorted({row["length"] for row in rows}):
        here = {row["part"]: row["divergence"] for row in rows if row["length"] == length}
        bare = here.get(FEATURELESS)
        if bare is not None and "converted" in here:
            helped[length] = here["converted"] < NEARLY * bare
    return next(
        (length for length in helped if not any(helps for other, helps in helped.items() if other >= length)), None
    )


def which(receipt: Result, receipts: Sequence[Result]) -> str:
    """The name of its folder, where a page has more than one conversion to tell apart."""
    return receipt.path.absolute().parent.name if len(receipts) > 1 else ""


def facts(receipt: Result) -> list[Fact]:
    """The numbers a person decides on, each with the length it was measured at."""
    content = receipt.content
    found = [Fact(f"{content['kept']} of {content['heads']}", "heads keep softmax", _others(content))]
    if shown := at_longest(content, "perplexity_ratio"):
        length, here = shown
        bare = here.get(FEATURELESS)
        without = "" if bare is None else f"{bare - 1:+.1%} with sinks and window only"
        found.append(Fact(f"{here['converted'] - 1:+.1%}", f"perplexity, held-out text of {length:,} tokens", without))
    for key, label in (("repetition", "of a repeated sequence predicted"), ("needle", "of a hidden number recalled")):
        if shown := at_longest(content, key):
            length, here = shown
            label = f"{label}, {length:,} tokens"
            found.append(Fact(f"{here['converted']:.0%}", label, f"original {here['original']:.0%}"))
    if gain := longest(content):
        saved = 1 - gain["converted"]["cache_bytes"] / gain["original"]["cache_bytes"]
        faster = gain["converted"]["decode"] / gain["original"]["decode"]
        size = f"{megabytes(gain['original'])} → {megabytes(gain['converted'])} MB"
        found.append(Fact(f"{saved:.0%} smaller", f"cache at {gain['context']:,} tokens", size))
        speed = f"{gain['original']['decode']:.1f} → {gain['converted']['decode']:.1f} tokens/s"
        found.append(Fact(f"{faster:.2g}x", f"decoding speed at {gain['context']:,} tokens", speed))
    return found


def _others(content: Row) -> str:
    """What the replaced heads have."""
    options = content["options"]
    window, windows = options.get("window"), content.get("windows") or {}
    near = f", and exactly {exact_tokens(options, windows)}" if window else ""
    return f"the others: {content['mechanism']} features{near}"


def megabytes(entry: Row) -> str:
    """Of 10^6 bytes, as everywhere in this project."""
    return f"{entry['cache_bytes'] / 1e6:,.0f}"


def longest(content: Row) -> Row | None:
    """Original and converted at the longest context both were timed at, within the model's own positions if any is.

    Quality is known there only, and a gain beyond it is none that anybody can have.
    """
    speed = content.get("speed") or {}
    by_model = {name: {row["context"]: row for row in speed.get(name, [])} for name in ("original", "converted")}
    shared = set(by_model["original"]) & set(by_model["converted"])
    if not shared:
        return None
    most = content.get("positions") or math.inf
    context = max([each for each in shared if each <= most] or shared)
    return {"context": context} | {name: rows[context] for name, rows in by_model.items()}


def filled(columns: Sequence[Column], rows: Sequence[Row]) -> list[Column]:
    """Without columns that no row fills, and without the folder when there is only one."""
    folders = {row.get("folder") for row in rows}
    return [
        column
        for column in columns
        if any(row.get(column.key) is not None for row in rows) and not (column.key == "folder" and len(folders) == 1)
    ]
