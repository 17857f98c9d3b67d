"""What a receipt says, in the forms that sections share: rows by length, the headline numbers, the limit."""

import math
from collections.abc import Sequence
from typing import Any

from attngap.report.page import Column, Fact
from attngap.report.results import Result

Row = dict[str, Any]
FEATURELESS = ("without features", "sinks + window only")
NEARLY = 0.98  # features that take off less than this share of the divergence add nothing to speak of


def by_length(content: Row) -> list[Row]:
    """Rows of length, part and whatever was measured; a receipt from before there were lengths has one or two."""
    if rows := content.get("by_length"):
        return sorted(rows, key=lambda row: row["length"])
    found: dict[tuple[int, str], Row] = {}
    fitted = int(content["options"].get("context") or 0)
    for part, values in content["quality"].items():
        row = found.setdefault((fitted, part), {"length": fitted, "part": part})
        row |= {key: values.get(key) for key in ("perplexity", "perplexity_ratio", "divergence")}
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
    for length in sorted({row["length"] for row in rows}, reverse=True):
        here = {row["part"]: row[key] for row in rows if row["length"] == length}
        if {"original", "converted"} <= set(here):
            return length, here
    return None


def limit(content: Row) -> str | None:
    """From which length on replaced heads read no more than the first and the last tokens; None if none is known."""
    options = content["options"]
    near = f"the first {options['sinks']} and the last {options['window']} tokens" if options.get("window") else ""
    if not near:
        return None
    if not content.get("by_length"):
        return (
            f"Beyond {options['context']:,} tokens replaced heads read {near} only." if options.get("context") else None
        )
    rows = [row for row in by_length(content) if row.get("divergence") is not None]
    helped = {}
    for length in sorted({row["length"] for row in rows}):
        here = {row["part"]: row["divergence"] for row in rows if row["length"] == length}
        bare = next((here[name] for name in FEATURELESS if name in here), None)
        if bare is not None and "converted" in here:
            helped[length] = here["converted"] < NEARLY * bare
    useless = [length for length in helped if not any(helps for other, helps in helped.items() if other >= length)]
    if not useless:
        return None
    return f"From {useless[0]:,} tokens on replaced heads do no better than with {near} only."


def facts(receipt: Result) -> list[Fact]:
    """The numbers a person decides on, each with the length it was measured at."""
    content = receipt.content
    found = [Fact(f"{content['kept']} of {content['heads']}", "heads keep softmax", f"{content['mechanism']} replaces")]
    if shown := at_longest(content, "perplexity_ratio"):
        length, here = shown
        found.append(Fact(f"{here['converted'] - 1:+.1%}", f"perplexity, held-out text of {length:,} tokens"))
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
