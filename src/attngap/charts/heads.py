"""Pictures of heads: the layer x head map, one head's floor and ceiling, where the damage sits."""

import dataclasses
import math
from collections.abc import Sequence

from attngap.charts.frame import BLUE, GRAY, ORANGE, TEAL, Row, altair, chart_class, rows
from attngap.errors import unknown


@dataclasses.dataclass(frozen=True)
class Metric:
    """A number a head has: its key in a head row, its name for people, how it is written and colored."""

    key: str
    label: str
    form: str = ".3g"
    scale: str = "linear"
    help: str = ""


# What the map can be colored by, in the order of the selector.
METRICS = (
    Metric("damage", "damage on text", ".2g", "log", "Fisher estimate of the KL, nats per token, this head replaced"),
    Metric("recall_damage", "damage on recall", ".2g", "log", "the same where a random sequence repeats"),
    Metric(
        "unavoidable",
        "unavoidable on text",
        ".2g",
        "log",
        "an estimate: what remains with the best weights constructed at this rank",
    ),
    Metric("recall_unavoidable", "unavoidable on recall", ".2g", "log", "the same where a random sequence repeats"),
    Metric("floor", "floor", ".1%", "sqrt", "certified lower bound on the relative error of any linear attention"),
    Metric(
        "weighted_floor",
        "weighted floor",
        ".2g",
        "log",
        "certified: error of the far weights, counted by what the model reads, that no state of this rank avoids",
    ),
    Metric("kappa", "selection exponent κ", ".2f", "linear", "at least 1: the row's top key holds half the mass"),
    Metric("sink", "sink mass", ".1%", "linear", "attention on the first tokens"),
    Metric("far", "far mass", ".1%", "linear", "attention outside the window and the sinks"),
)

# What the map can be colored by besides numbers: a name for each square, and the colors of the names.
NAMED = {
    "verdict": {"keep": ORANGE, "replace": BLUE, "window": TEAL, "linear": GRAY},
    "converted": {
        "softmax, as planned": ORANGE,
        "softmax, traded in": "#ffb27a",
        "replaced, traded out": "#6d4ba3",
        "replaced": BLUE,
    },
}
VERDICTS = NAMED["verdict"]


def head_map(heads: Sequence[Row], color: str = "verdict"):
    """Layers across, heads down, one square per head; `color` is a key of NAMED or of a METRIC the heads carry."""
    alt = altair()
    tall = 1 + max(head["head"] for head in heads)
    chosen = alt.param(name="chosen", value="")
    named = [name for name in NAMED if heads[0].get(name) is not None]
    known = [metric for metric in METRICS if metric.key in heads[0]]
    tooltip = [alt.Tooltip("id:N", title="head"), *(alt.Tooltip(f"{name}:N") for name in named)]
    tooltip += [alt.Tooltip(f"{metric.key}:Q", title=metric.label, format=metric.form) for metric in known]
    outline = alt.condition("datum.id == chosen", alt.value(3), alt.value(0))
    gap = alt.Scale(paddingInner=0.08)
    return (
        chart_class()(rows(heads, ["id", "layer", "head", *named, *(metric.key for metric in known)]))
        .mark_rect(cornerRadius=1.5, stroke="#000")
        .encode(
            x=alt.X("layer:O", title="layer", scale=gap, axis=alt.Axis(labelAngle=0, labelOverlap=True, ticks=False)),
            y=alt.Y("head:O", title="head", scale=gap, axis=alt.Axis(labelOverlap=True, ticks=False)),
            color=_color(alt, heads, color),
            strokeWidth=outline,
            tooltip=tooltip,
        )
        .add_params(chosen)
        .properties(width="container", height=max(100, (24 if tall <= 16 else 14 if tall <= 40 else 9) * tall))
    )


def _color(alt, heads: Sequence[Row], color: str):
    if color in NAMED:
        names = [name for name in NAMED[color] if any(head[color] == name for head in heads)]
        scale = alt.Scale(domain=names, range=[NAMED[color][name] for name in names])
        legend = alt.Legend(orient="top", labelLimit=0, symbolStrokeWidth=0)
        return alt.Color(f"{color}:N", title=None, scale=scale, legend=legend)
    metric = next((metric for metric in METRICS if metric.key == color), None)
    if metric is None:
        raise unknown("color", color, [*NAMED, *(metric.key for metric in METRICS)])
    kind = metric.scale
    if kind == "log" and min((head.get(color) or 0) for head in heads) <= 0:
        kind = "sqrt"  # a logarithm has no place for heads without damage
    legend = alt.Legend(orient="top", format=metric.form, gradientLength=180, tickCount=3)
    return alt.Color(f"{color}:Q", title=metric.label, scale=alt.Scale(type=kind, scheme="plasma"), legend=legend)


def bounds(points: Sequence[Row] | None = None):
    """Relative error against rank: the certified floor, the ceiling that a construction reaches, the band between.

    Rows: rank, floor, ceiling. Without rows the data is named "bounds", for a page that fills it in.
    """
    alt = altair()
    base = alt.Chart(alt.NamedData("bounds") if points is None else rows(points))
    x = alt.X("rank:Q", scale=alt.Scale(type="log", base=2), title="state rank r", axis=alt.Axis(tickCount=5))
    percent = alt.Axis(format="%", tickCount=4)
    band = base.mark_area(opacity=0.25, color=BLUE).encode(
        x=x, y=alt.Y("floor:Q", title="relative error", axis=percent), y2="ceiling:Q"
    )
    line = {"x": x, "tooltip": ["rank:Q", alt.Tooltip("floor:Q", format=".2%"), alt.Tooltip("ceiling:Q", format=".2%")]}
    floor = base.mark_line(color=ORANGE, point=alt.OverlayMarkDef(color=ORANGE)).encode(y="floor:Q", **line)
    ceiling = base.mark_line(color=BLUE, point=alt.OverlayMarkDef(color=BLUE)).encode(y="ceiling:Q", **line)
    return alt.layer(band, floor, ceiling).properties(width="container", height=190)


def spectrum(points: Sequence[Row] | None = None):
    """Singular values of the weights, largest first: how fast they fall decides how small a state can be.

    Rows: place (from 1), value. Without rows the data is named "spectrum", for a page that fills it in.
    """
    alt = altair()
    return (
        alt.Chart(alt.NamedData("spectrum") if points is None else rows(points))
        .mark_line(color=BLUE)
        .encode(
            x=alt.X(
                "place:Q",
                scale=alt.Scale(type="log", base=2),
                title="singular value number",
                axis=alt.Axis(tickCount=5),
            ),
            y=alt.Y("value:Q", scale=alt.Scale(type="log"), title="size", axis=alt.Axis(tickCount=4, format=".0e")),
            tooltip=["place:Q", alt.Tooltip("value:Q", format=".3g")],
        )
        .properties(width="container", height=190)
    )


KINDS = {"text": "damage", "recall": "recall_damage"}  # what damage is measured on, and its key in a head's row
PARTS = {"would remain": BLUE, "lost by the feature map": "#9cc3e2"}


def damage_split(heads: Sequence[Row], kind: str = "text", most: int = 20):
    """The heads that cost most on text, or on recall where a sequence repeats, each bar split into what the best
    weights of the rank would still cost and what the feature map loses on top."""
    alt = altair()
    worst = sorted(heads, key=lambda head: -(head.get(KINDS[kind]) or 0.0))[:most]
    parts = [
        {"id": head["id"], "part": part, "damage": value, "order": place, "stack": stack}
        for place, head in enumerate(worst)
        for stack, (part, value) in enumerate(zip(PARTS, _split(head, kind), strict=True))
    ]
    colors = alt.Scale(domain=list(PARTS), range=list(PARTS.values()))
    return (
        alt.Chart(rows(parts))
        .mark_bar()
        .encode(
            y=alt.Y("id:N", sort=alt.SortField("order"), title="head (layer.head)"),
            x=alt.X("damage:Q", title=f"damage on {kind}, nats per token", axis=alt.Axis(tickCount=4)),
            color=alt.Color("part:N", scale=colors, legend=None),
            order=alt.Order("stack:Q"),
            tooltip=["id:N", "part:N", alt.Tooltip("damage:Q", format=".3g")],
        )
        .properties(width="container", height=16 * len(worst))
    )


def _split(head: Row, kind: str) -> tuple[float, float]:
    """What would remain and what is lost on top; what would remain of a damage is at most all of it."""
    damage = head.get(KINDS[kind]) or 0.0
    least = min(damage, head.get(KINDS[kind].replace("damage", "unavoidable")) or 0.0)
    return least, damage - least


def concentration(heads: Sequence[Row]):
    """Share of all damage carried by the k most harmful heads, on text and on recall: how few must be kept."""
    alt = altair()
    points = []
    kinds = {"text": ("damage", BLUE), "recall": ("recall_damage", ORANGE)}
    drawn = [kind for kind, (key, _) in kinds.items() if any(head.get(key) for head in heads)]
    for kind in drawn:
        values = sorted((head.get(kinds[kind][0]) or 0.0 for head in heads), reverse=True)
        running, total = 0.0, sum(values)
        points.append({"heads": 0, "share": 0.0, "kind": kind})
        for place, value in enumerate(values, 1):
            running += value
            points.append({"heads": place, "share": running / total, "kind": kind})
    colors = alt.Scale(domain=drawn, range=[kinds[kind][1] for kind in drawn])
    return (
        alt.Chart(rows(points))
        .mark_line(interpolate="monotone")
        .encode(
            x=alt.X(
                "heads:Q",
                title="heads kept, most harmful first",
                scale=alt.Scale(nice=False),
                axis=alt.Axis(tickCount=10),
            ),
            y=alt.Y("share:Q", title="share of all damage they carry", axis=alt.Axis(format="%")),
            color=alt.Color("kind:N", scale=colors, title=None, legend=alt.Legend(orient="top")),
            tooltip=["kind:N", "heads:Q", alt.Tooltip("share:Q", format=".1%")],
        )
        .properties(width="container", height=240)
    )


def selection(heads: Sequence[Row], context: int, most: int = 48):
    """Selection exponent against context, one line per head: kappa(n) = M / log(n - 1), M as the median row has it.

    Every line goes through its own point, measured at `context`, and falls through 1 at n* = 1 + (context - 1)^kappa.
    Of many heads the `most` selective are drawn.
    """
    alt = altair()
    known = [head for head in heads if (head.get("kappa") or 0) > 0]
    chosen = sorted(known, key=lambda head: -head["kappa"])[:most]
    chosen.sort(key=lambda head: head["verdict"] == "keep")  # those to keep are drawn last, on top
    lengths = [32 * 2 ** (step / 2) for step in range(31)]  # 32 to a million tokens
    keys = ("id", "verdict", "n_star")
    lines = [
        {key: head.get(key) for key in keys}
        | {"n": n, "kappa": head["kappa"] * math.log(context - 1) / math.log(n - 1)}
        for head in chosen
        for n in lengths
    ]
    top = max([2.0, *(head["kappa"] for head in chosen)])
    x = alt.X(
        "n:Q",
        scale=alt.Scale(type="log", nice=False),
        title="context, tokens",
        axis=alt.Axis(values=[100, 1e3, 1e4, 1e5, 1e6], format="~s", labelFlush=True),
    )
    y = alt.Y("kappa:Q", title="selection exponent κ", scale=alt.Scale(domain=[0, top]))
    names = [name for name in VERDICTS if any(head["verdict"] == name for head in chosen)]
    scale = alt.Scale(domain=names, range=[VERDICTS[name] for name in names])
    color = alt.Color("verdict:N", scale=scale, title=None, legend=alt.Legend(orient="top", symbolOpacity=1))
    tips = ["id:N", "verdict:N", alt.Tooltip("n_star:Q", format=",.0f", title="n*")]
    drawn = alt.Chart(rows(lines)).mark_line(opacity=0.4, strokeWidth=1.2, clip=True)
    points = alt.Chart(rows([head | {"n": context} for head in chosen], [*keys, "kappa", "n"])).mark_circle(size=42)
    here = alt.Chart(rows([{"n": context}])).mark_rule(strokeDash=[4, 3]).encode(x="n:Q")
    one = alt.Chart(rows([{"kappa": 1}])).mark_rule(strokeDash=[4, 3]).encode(y="kappa:Q")
    return alt.layer(
        drawn.encode(x=x, y=y, color=color, detail="id:N", tooltip=tips),
        here,
        one,
        points.encode(x=x, y=y, color=color, tooltip=tips),
    ).properties(width="container", height=300)


def plain_map():
    """Any share (0 to 1) of every head, for a page that fills in the data named "heads": id, layer, head, value.

    A row may carry `verdict` (heads to keep get a dot) and `replaced`.
    """
    alt = altair()
    gap, shades = alt.Scale(paddingInner=0.08), alt.Scale(scheme="plasma", domainMin=0)
    empty = [{"id": "", "layer": 0, "head": 0, "value": 0.0}]  # an extent for the colors until there are rows
    base = alt.Chart(alt.InlineData(name="heads", values=empty))
    x = alt.X("layer:O", scale=gap, axis=alt.Axis(labelAngle=0, labelOverlap=True, ticks=False))
    y = alt.Y("head:O", scale=gap, axis=alt.Axis(labelOverlap=True, ticks=False))
    tips = ["id:N", alt.Tooltip("value:Q", format=".3f"), "verdict:N", "replaced:N"]
    squares = base.mark_rect(cornerRadius=1.5, stroke="#000").encode(
        x=x,
        y=y,
        color=alt.Color("value:Q", title=None, scale=shades, legend=alt.Legend(orient="top")),
        strokeWidth=alt.condition("datum.id == chosen", alt.value(3), alt.value(0)),
        tooltip=tips,
    )
    dots = (
        base.transform_filter("datum.verdict == 'keep'")
        .mark_circle(color="#fff", stroke="#000", strokeWidth=1, size=28, opacity=1)
        .encode(x=x, y=y, tooltip=tips)
    )
    return (
        alt.layer(squares, dots)
        .add_params(alt.param(name="chosen", value=""))
        .properties(width="container", height=220)
    )
