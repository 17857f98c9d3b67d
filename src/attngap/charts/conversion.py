"""Pictures of a conversion: what it costs in quality, what it gains in speed and memory."""

import itertools
import math
from collections.abc import Sequence

from attngap.charts.frame import BLUE, GRAY, ORANGE, PURPLE, TEAL, Row, altair, rows

Point = tuple[int | float, int | float]  # context, value
MODELS = {"original": GRAY, "converted": BLUE, "sinks + window only": ORANGE, "random heads": PURPLE}


def quality_against_kept(points: Sequence[Row], title: str):
    """A dot a measurement over the share of heads that keep softmax. Rows: kept (a share), model, value."""
    alt = altair()
    names = [name for name in MODELS if any(point["model"] == name for point in points)]
    colors = alt.Scale(domain=names, range=[MODELS[name] for name in names])
    return (
        alt.Chart(rows(points))
        .mark_line(
            point=alt.OverlayMarkDef(size=90), strokeDash=[2, 5], strokeWidth=1
        )  # dashed: nothing measured there
        .encode(
            x=alt.X("kept:Q", title="share of heads that keep softmax", axis=alt.Axis(format="%")),
            y=alt.Y("value:Q", title=title, scale=alt.Scale(zero=False)),
            color=alt.Color("model:N", scale=colors, title=None, legend=alt.Legend(orient="top", columns=2)),
            tooltip=["model:N", alt.Tooltip("kept:Q", format=".1%"), alt.Tooltip("value:Q", format=".4f")],
        )
        .properties(width="container", height=260)
    )


def predicted_damage(points: Sequence[Row], chosen: int | None = None):
    """Damage a plan predicts for every number of kept heads, on text and where a sequence repeats; the choice marked.

    Rows: kept, kind, damage.
    """
    alt = altair()
    colors = alt.Scale(domain=["text", "repeated sequence"], range=[BLUE, ORANGE])
    lines = (
        alt.Chart(rows(points))
        .mark_line(interpolate="monotone")
        .encode(
            x=alt.X("kept:Q", title="heads that keep softmax"),
            y=alt.Y("damage:Q", title="predicted damage, nats a token", scale=alt.Scale(type="symlog", constant=0.01)),
            color=alt.Color("kind:N", scale=colors, title=None, legend=alt.Legend(orient="top")),
            tooltip=["kind:N", "kept:Q", alt.Tooltip("damage:Q", format=".3g")],
        )
    )
    if chosen is None:
        return lines.properties(width="container", height=260)
    mark = alt.Chart(rows([{"kept": chosen}])).mark_rule(strokeDash=[5, 4]).encode(x="kept:Q")
    return alt.layer(lines, mark).properties(width="container", height=260)


def against_context(points: Sequence[Row], title: str, cross: float | None = None):
    """A line a model over context, both axes in logarithms; `cross` marks where the converted model overtakes.

    Rows: context, model, value.
    """
    alt = altair()
    names = [name for name in MODELS if any(point["model"] == name for point in points)]
    contexts = sorted({point["context"] for point in points})
    colors = alt.Scale(domain=names, range=[TEAL if name == "converted" else MODELS[name] for name in names])
    x = alt.X(
        "context:Q",
        title="context, tokens",
        scale=alt.Scale(type="log", base=2),
        axis=alt.Axis(values=contexts, labelExpr="datum.value % 1024 ? datum.label : datum.value / 1024 + 'k'"),
    )
    lines = (
        alt.Chart(rows(points))
        .mark_line(point=alt.OverlayMarkDef(size=60))
        .encode(
            x=x,
            y=alt.Y(
                "value:Q",
                title=title,
                scale=alt.Scale(type="log", nice=False, padding=12),
                axis=alt.Axis(format="~s", tickCount=5),
            ),
            color=alt.Color("model:N", scale=colors, title=None, legend=alt.Legend(orient="top")),
            tooltip=["model:N", "context:Q", alt.Tooltip("value:Q", format=".3s")],
        )
    )
    if cross is None:
        return lines.properties(width="container", height=240)
    mark = alt.Chart(rows([{"context": cross}]))
    line = mark.mark_rule(strokeDash=[5, 4]).encode(x=x)
    word = mark.mark_text(align="left", dx=5, dy=8, baseline="top").encode(
        x=x, y=alt.value(0), text=alt.value(f"overtakes at {cross:,.0f}")
    )
    return alt.layer(lines, line, word).properties(width="container", height=240)


def crossover(first: Sequence[Point], second: Sequence[Point]) -> float | None:
    """The context at which `second` overtakes `first`, by straight lines in logarithms; None if it does not, or leads
    from the start.

    >>> crossover([(1024, 20.0), (4096, 5.0)], [(1024, 10.0), (4096, 10.0)])
    2048.0
    """
    other = dict(second)
    lead = [(math.log(x), math.log(other[x] / y)) for x, y in sorted(first) if x in other]
    for (x0, d0), (x1, d1) in itertools.pairwise(lead):
        if d0 < 0 <= d1:
            return round(math.exp(x0 + (x1 - x0) * -d0 / (d1 - d0)), 6)
    return None
