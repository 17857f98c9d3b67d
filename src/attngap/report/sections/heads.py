"""The heads of one model: the map, one head in detail, the damage and where it sits, how far selection reaches."""

import dataclasses
from typing import Any

from attngap.charts import heads as charts
from attngap.report.page import Block, Chart, Column, HeadPanel, PanelChart, Section, Table, Text
from attngap.report.patterns import Patterns, read_patterns
from attngap.report.results import Result

Row = dict[str, Any]

TABLE = (
    Column("id", "head"),
    Column("verdict", "verdict"),
    Column("damage", "damage", ".2g", "nats a token on text when this head alone is replaced"),
    Column("recall_damage", "recall damage", ".2g", "the same where a random sequence repeats"),
    Column(
        "unavoidable", "unavoidable", ".2g", "an estimate: what remains with the best weights constructed at this rank"
    ),
    Column("floor", "floor", ".1%", "certified: no linear attention of this rank comes nearer"),
    Column("kappa", "κ", ".2f", "selection exponent, median row"),
    Column("sink", "sink", ".1%", "mass on the first tokens"),
    Column("far", "far", ".1%", "mass outside window and sinks"),
    Column("why", "why"),
)
DETAILS = (
    Column("damage", "damage, nats a token", ".3g"),
    Column("recall_damage", "damage where a sequence repeats", ".3g"),
    Column("unavoidable", "of it unavoidable at this rank", ".3g"),
    Column("lost", "of it lost by the feature map", ".3g"),
    Column("measured", "measured KL, this head replaced", ".3g"),
    Column("floor", "floor (certified)", ".2%"),
    Column("ceiling", "ceiling (reached)", ".2%"),
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
DEPTH = 1024  # patterns, floors and fits look at the first tokens of a passage only (see docs/schema.md)
COLORS = {"verdict": "verdict"} | {metric.label: metric.key for metric in charts.METRICS}


def head_sections(result: Result, suffix: str = "") -> list[Section]:
    """Sections for one diagnosis; `suffix` keeps ids apart when a page holds several."""
    rows = head_rows(result)
    found = [_map(result, rows, suffix)]
    if any(row.get("damage") is not None for row in rows):
        found.append(_damage(result, rows, suffix))
    found.append(_selection(result, rows, suffix))
    return found


def head_rows(result: Result) -> list[Row]:
    """The heads as diagnosis.json has them, the most important first, with what the panel draws."""
    options = result.content.get("options", {})
    rows = []
    for place, head in enumerate(result.content["heads"]):
        row = dict(head) | {"place": place}
        row["why"] = head["reason"].split(";")[0]  # the costs have columns of their own
        row["words"] = f"{head['verdict'].capitalize()}: {head['reason']}"
        row["reads"] = [read_line(read) for read in head.get("reads") or []]
        row["bounds"] = bound_points(head, options.get("ranks") or [])
        row["spectrum"] = [value for value in head.get("spectrum") or [] if value > 0]
        rows.append(row)
    return sorted(rows, key=lambda row: -(row.get("importance") or 0.0))


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
    choices = {label: charts.head_map(rows, key).to_dict() for label, key in measured.items()}
    map_id, table_id = f"map{suffix}", f"heads{suffix}"
    rank = result.content.get("rank")
    caption = "Layers across, heads down. Click a square, or walk with the arrow keys, to open that head below."
    if rank:
        caption += f" Floor, ceiling and unavoidable damage are for a state of rank {rank}."
    tokens = min(int(result.content.get("options", {}).get("context") or DEPTH), DEPTH)
    patterns = read_patterns(result.path, len(rows), tokens)
    blocks: list[Block] = [
        Chart(
            map_id,
            "Layer x head",
            "Every head of the model colored by what is chosen",
            choices["verdict"],
            caption,
            choices,
            "Color by",
        ),
        _panel(f"head{suffix}", map_id, table_id, rows, patterns),
        Table(table_id, "All heads, the most important first", _measured(TABLE, rows), rows, opens_head=True),
    ]
    notes = result.content.get("notes") or []
    if notes:
        blocks.append(Text(notes, "note"))
    return Section(f"heads{suffix}-section", "Heads", blocks)


def _panel(id: str, map_id: str, table_id: str, rows: list[Row], patterns: Patterns | None) -> HeadPanel:
    own = [
        PanelChart(
            "bounds",
            "Error of the best linear attention against the rank of its state: at least the floor (orange, certified), "
            "at most the ceiling (blue, reached).",
            charts.bounds().to_dict(),
        ),
        PanelChart("spectrum", "Singular values of the weights between distant tokens.", charts.spectrum().to_dict()),
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
    total = sum(row["damage"] or 0.0 for row in rows)
    certain = total - sum(row["lost"] or 0.0 for row in rows)
    worst = sorted((row["damage"] or 0.0 for row in rows), reverse=True)
    few = max(1, round(len(rows) / 10))
    lead = (
        f"The worst {few} of {len(rows)} heads carry {sum(worst[:few]) / (total or 1.0):.0%} of the damage. "
        f"Of all damage {certain / (total or 1.0):.0%} would remain with the best weights constructed at rank "
        f"{result.content.get('rank')}; the rest is lost by the feature map and could be won back by a better one."
    )
    split = Chart(
        f"damage-split{suffix}",
        "Unavoidable and reducible damage",
        "A bar for each of the thirty most harmful heads, split into unavoidable and reducible damage",
        charts.damage_split(rows).to_dict(),
        "First-order estimates for one head at a time: what remains when the best weights of this rank replace the "
        "head, and what the fitted feature map loses on top. Damage of several heads need not add up.",
    )
    share = Chart(
        f"damage-share{suffix}",
        "How concentrated it is",
        "The share of all damage carried by the most harmful heads",
        charts.concentration(rows).to_dict(),
    )
    blocks: list[Block] = [split, share]
    check = result.content.get("verification")
    if check:
        blocks.append(Text([_verified(check)]))
    return Section(f"damage{suffix}", "Damage", blocks, lead)


def _verified(check: Row) -> str:
    return (
        f"Checked: {len(check['heads'])} heads were replaced one at a time on {check['passages']} other passages of "
        f"{check['context']} tokens; estimate and measured KL rank them alike with Spearman {check['spearman']:.2f}."
    )


def _selection(result: Result, rows: list[Row], suffix: str) -> Section:
    context = int(result.content.get("options", {}).get("context") or 1024)
    chart = Chart(
        f"selection{suffix}",
        "Selection exponent and reach",
        "Selection exponent of the most selective heads against context",
        charts.selection(rows, context).to_dict(),
        "κ ≥ 1 means that the top key holds half of a row's mass (an identity). Points are measured at "
        f"{context:,} tokens, median row; lines extrapolate to where a head stops selecting, n*, if further keys are "
        "like the present ones. The heads with the largest n* are drawn.",
    )
    return Section(f"selection{suffix}-section", "Selection", [chart])
