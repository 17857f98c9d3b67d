"""The heads of one model: the map, one head in detail, the damage and where it sits, how far selection reaches."""

import dataclasses
import re
from typing import Any

from attngap.charts import heads as charts
from attngap.report.page import Block, Chart, Column, HeadPanel, PanelChart, Panels, Section, Table, Text
from attngap.report.patterns import Patterns, read_patterns
from attngap.report.results import Result
from attngap.report.sections.notes import notes

Row = dict[str, Any]
WEIGHTED = "error of the far weights, counted by what the model reads, that no state of this rank avoids; no damage"
UNAVOIDABLE = "an estimate: what remains with the best weights constructed at this rank"

TABLE = (
    Column("id", "head"),
    Column("verdict", "verdict"),
    Column("for", "kept for", help="which damage decided: text, or recall where a random sequence repeats"),
    Column("does", "what it does", wide=True),
    Column("converted", "converted to", help="what the converted model has, and where it differs from the plan"),
    Column("damage", "text damage", ".2g", "nats per token on text when this head alone is replaced"),
    Column("recall_damage", "recall damage", ".2g", "the same where a random sequence repeats"),
    Column("unavoidable", "text, unavoidable", ".2g", UNAVOIDABLE),
    Column("recall_unavoidable", "recall, unavoidable", ".2g", f"{UNAVOIDABLE}, where a random sequence repeats"),
    Column("floor", "floor, text", ".1%", "certified: no linear attention of this rank comes nearer to these weights"),
    Column("stress_floor", "floor, recall", ".1%", "the same where a random sequence repeats"),
    Column("kappa", "κ", ".2f", "selection exponent, median row"),
    Column("sink", "sink", ".1%", "mass on the first tokens"),
    Column("far", "far", ".1%", "mass outside window and sinks"),
)
DETAILS = (
    Column("damage", "damage on text, nats per token", ".3g"),
    Column("unavoidable", "of it unavoidable at this rank", ".3g", UNAVOIDABLE),
    Column("measured", "measured KL on text", ".3g", "this head alone replaced, on other passages"),
    Column("recall_damage", "damage on recall", ".3g", "where a random sequence repeats"),
    Column("recall_unavoidable", "of it unavoidable at this rank", ".3g", UNAVOIDABLE),
    Column("recall_measured", "measured KL on recall", ".3g"),
    Column("floor", "floor on text (certified)", ".2%"),
    Column("ceiling", "ceiling on text (reached)", ".2%"),
    Column("stress_floor", "floor on recall (certified)", ".2%"),
    Column("stress_ceiling", "ceiling on recall (reached)", ".2%"),
    Column("weighted_floor", "weighted floor on text (certified)", ".2g", WEIGHTED),
    Column("stress_weighted_floor", "weighted floor on recall (certified)", ".2g", WEIGHTED),
    Column("fit", "output error, fitted map", ".2%"),
    Column("far", "far mass", ".2%"),
    Column("near", "mass in the window", ".2%"),
    Column("sink", "sink mass", ".2%"),
    Column("top", "largest weight, mean", ".2%"),
    Column("entropy", "entropy / log n", ".3f"),
    Column("kappa", "selection exponent κ", ".3f"),
    Column("selecting", "rows that select (κ ≥ 1)", ".1%"),
    Column("n_star", "n*, extrapolated", ",.0f"),
    Column("logit_ratio", "logit size / sqrt(log n)", ".2f"),
    Column("induction", "induction score", ".2%"),
    Column("previous", "previous-token score", ".2%"),
    Column("duplicate", "duplicate-token score", ".2%"),
    Column("monotonicity", "monotonicity of the fitted map", ".2f"),
)
KEPT_FOR = re.compile(r"kept for (\w+):")
MAX_TOKENS = 1024  # patterns, floors and fits look at the first tokens of a passage only (see docs/schema.md)
COLORS = {"what was converted": "converted", "verdict": "verdict"}
COLORS |= {metric.label: metric.key for metric in charts.METRICS}


def head_sections(result: Result, suffix: str = "", receipt: Result | None = None) -> list[Section]:
    """Sections for one diagnosis; `suffix` keeps ids apart when a page holds several.

    With the receipt of a conversion of the same model the map shows first what that model has.
    """
    rows = head_rows(result)
    if receipt is not None:
        mark_converted(rows, receipt.content)
    found = [_map(result, rows, suffix)]
    if any(row.get("damage") is not None for row in rows):
        found.append(_damage(result, rows, suffix))
    found.append(_selection(result, rows, suffix))
    return found


def head_rows(result: Result) -> list[Row]:
    """The heads as diagnosis.json has them, the most important first, with what the panel draws."""
    ranks = result.content.get("options", {}).get("ranks") or []
    rank = result.content.get("rank")
    place_of_rank = ranks.index(rank) if rank in ranks else None
    rows = []
    for place, head in enumerate(result.content["heads"]):
        row = dict(head) | {"place": place}
        row |= what_and_why(head["reason"])
        row["words"] = verdict_words(head["verdict"], head["reason"])
        row["reads"] = [read_line(read) for read in head.get("reads") or []]
        row["bounds"] = bound_points(head, ranks)
        for name in ("recall_unavoidable", "stress_floor", "stress_ceiling"):
            values = head.get(f"{name}s")
            if row.get(name) is None:  # a diagnosis from before it was a field of its own
                row[name] = values[place_of_rank] if values and place_of_rank is not None else None
        row["spectrum"] = [value for value in head.get("spectrum") or [] if value > 0]
        rows.append(row)
    return sorted(rows, key=lambda row: -(row.get("importance") or 0.0))


def verdict_words(verdict: str, reason: str) -> str:
    """
    >>> verdict_words("keep", "kept for recall: replacing it costs 0.1 nats there")
    'Kept for recall: replacing it costs 0.1 nats there.'
    >>> verdict_words("window", "reads the token before (86%)")
    'Window: reads the token before (86%).'
    """
    return f"{reason[0].upper()}{reason[1:]}." if KEPT_FOR.match(reason) else f"{verdict.capitalize()}: {reason}."


def what_and_why(reason: str) -> Row:
    """The parts of a reason that have columns of their own: damages and floors have theirs.

    >>> what_and_why("kept for recall: replacing it costs 0.1 nats there; reads the token before (86%); no weights ...")
    {'for': 'recall', 'does': 'reads the token before (86%)'}
    >>> what_and_why("mostly local: 96% nearby, 1% far; costs 3e-05 nats on text, 6e-06 on recall")
    {'for': None, 'does': 'mostly local: 96% nearby, 1% far'}
    """
    first, *others = reason.split("; ")
    kept = KEPT_FOR.match(first)
    return {"for": kept and kept[1], "does": others[0] if kept and others else first}


def mark_converted(rows: list[Row], receipt: Row) -> None:
    """`converted`: what the converted model has, and where that differs from what the verdict had wanted."""
    kept = {f"{layer}.{head}" for layer, head in receipt["keep"]}
    for row in rows:
        wanted = row["verdict"] == "keep"
        if row["id"] in kept:
            row["converted"] = "softmax, as planned" if wanted else "softmax, traded in"
        else:
            row["converted"] = "replaced, traded out" if wanted else "replaced"


def bound_points(head: Row, ranks: list[int]) -> list[Row]:
    floors, ceilings = head.get("floors") or [], head.get("ceilings") or []
    return [
        {"rank": rank, "floor": floor, "ceiling": ceilings[place] if place < len(ceilings) else None}
        for place, (rank, floor) in enumerate(zip(ranks, floors, strict=False))
    ]


def read_line(read: Row) -> str:
    """'" store" at 812 reads " Mary" 310 tokens back (next there: " went"), weight 0.83'."""
    return (
        f"{read['query']!r} at {read['at']} reads {read['key']!r} {read['distance']} tokens back "
        f"(next there: {read['after']!r}), weight {read['weight']:.2f}"
    )


def _map(result: Result, rows: list[Row], suffix: str) -> Section:
    measured = {label: key for label, key in COLORS.items() if any(row.get(key) is not None for row in rows)}
    first = next(iter(measured))
    choices = {label: charts.head_map(rows, key).to_dict() for label, key in measured.items()}
    map_id, table_id = f"map{suffix}", f"heads{suffix}"
    rank = result.content.get("rank")
    caption = "Layers across, heads down. Click a square, or walk with the arrow keys, to open that head below."
    if first != "verdict":
        caption += _traded(rows)
    if rank:
        caption += f" Floor, ceiling and unavoidable damage are for a state of rank {rank}."
    tokens = min(int(result.content.get("options", {}).get("context") or MAX_TOKENS), MAX_TOKENS)
    patterns = read_patterns(result.path, len(rows), tokens)
    blocks: list[Block] = [
        Chart(
            map_id,
            "Layer x head",
            "Every head of the model colored by what is chosen",
            choices[first],
            caption,
            choices,
            "Color by",
        ),
        _panel(f"head{suffix}", map_id, table_id, rows, patterns),
        Table(table_id, "All heads, the most important first", _measured(TABLE, rows), rows, opens_head=True),
    ]
    if result.content.get("notes"):
        blocks.append(notes(result.content["notes"]))
    return Section(f"heads{suffix}-section", "Heads", blocks)


def _traded(rows: list[Row]) -> str:
    count = sum(row["converted"] == "softmax, traded in" for row in rows)
    dropped = sum(row["converted"] == "replaced, traded out" for row in rows)
    if not count and not dropped:
        return " The conversion kept exactly the heads that the diagnosis had wanted."
    return f" The conversion traded {dropped} heads that the diagnosis had wanted to keep for {count} others."


def _panel(id: str, map_id: str, table_id: str, rows: list[Row], patterns: Patterns | None) -> HeadPanel:
    own = [
        PanelChart(
            "bounds",
            "On text: no linear attention of that rank copies these weights with less error than the floor (orange, "
            "certified); the ceiling (blue) is reached. It does not say that the model needs them: damage does.",
            charts.bounds().to_dict(),
        ),
        PanelChart(
            "spectrum",
            "Singular values of the weights between distant tokens: the faster they fall, the smaller a state will do.",
            charts.spectrum().to_dict(),
        ),
    ]
    keep = {"id", "layer", "head", "place", "words", "reads", "bounds", "spectrum"}
    keep |= {field.key for field in DETAILS}
    slim = [{key: value for key, value in row.items() if key in keep} for row in rows]
    panel = HeadPanel(id, map_id, table_id, slim, _measured(DETAILS, rows), own)
    if patterns is None:
        return panel
    return dataclasses.replace(panel, passages=patterns.passages(), pictures=patterns.cells())


def _measured(columns: tuple[Column, ...], rows: list[Row]) -> list[Column]:
    return [column for column in columns if any(row.get(column.key) is not None for row in rows)]


def _damage(result: Result, rows: list[Row], suffix: str) -> Section:
    rank = result.content.get("rank")
    bars = [
        Chart(
            f"damage-split{suffix}-{kind}",
            f"On {kind}",
            f"A bar for each of the twenty heads that cost most on {kind}, split in two",
            charts.damage_split(rows, kind).to_dict(),
        )
        for kind in charts.KINDS
        if any(row.get(charts.KINDS[kind]) for row in rows)
    ]
    split = Panels(
        f"damage-split{suffix}",
        "Which heads cost most",
        bars,
        "A long dark bar cannot be shortened by a better feature map, a long pale one can; the two scales differ. "
        "Second-order (Fisher) estimates for one head at a time; damage of several heads need not add up.",
        [("dark", "would remain with the best weights of this rank"), ("pale", "lost by the feature map")],
        wide=True,
    )
    share = Chart(
        f"damage-share{suffix}",
        "How concentrated it is",
        "The share of all damage carried by the most harmful heads, on text and on recall",
        charts.concentration(rows).to_dict(),
        "The steeper the start, the fewer heads must keep softmax. Each line orders the heads by its own damage.",
    )
    blocks: list[Block] = [split, share]
    check = result.content.get("verification")
    if check:
        blocks.append(Text([_verified(check)]))
    lead = [
        damage_line(rows, "damage", "unavoidable", rank),
        damage_line(rows, "recall_damage", "recall_unavoidable", rank),
    ]
    return Section(f"damage{suffix}", "Damage", blocks, " ".join(line for line in lead if line))


def damage_line(rows: list[Row], key: str, least: str, rank: int | None) -> str:
    """'On recall the worst 27 of 270 heads carry 88% of the damage, and 46% of it would remain ...'."""
    values = sorted((row.get(key) or 0.0 for row in rows), reverse=True)
    total = sum(values)
    if not total:
        return ""
    few = max(1, round(len(rows) / 10))
    where = "recall" if key.startswith("recall") else "text"
    line = f"On {where} the worst {few} of {len(rows)} heads carry {sum(values[:few]) / total:.0%} of the damage"
    if all(row.get(least) is None for row in rows):
        return f"{line}."
    remains = sum(min(row.get(key) or 0.0, row.get(least) or 0.0) for row in rows) / total
    return f"{line}, and {remains:.0%} of it would remain with the best weights constructed at rank {rank}."


def _verified(check: Row) -> str:
    line = (
        f"Checked: {len(check['heads'])} heads were replaced one at a time on {check['passages']} other passages of "
        f"{check['context']} tokens; estimate and measured KL rank them alike with Spearman {check['spearman']:.2f}"
    )
    recall = check.get("recall_spearman")
    return f"{line} on text and {recall:.2f} on recall." if recall is not None else f"{line}."


def _selection(result: Result, rows: list[Row], suffix: str) -> Section:
    context = int(result.content.get("options", {}).get("context") or 1024)
    chart = Chart(
        f"selection{suffix}",
        "Selection exponent and reach",
        "Selection exponent of the most selective heads against context",
        charts.selection(rows, context).to_dict(),
        "A head selects as long as its line is above 1, where the top key holds half of a row's mass (an identity). "
        f"Points are measured at {context:,} tokens, median row; lines extrapolate, if further keys are like the "
        "present ones, to n*, where they cross 1. The most selective heads are drawn, those to keep on top.",
    )
    return Section(f"selection{suffix}-section", "Selection", [chart])
