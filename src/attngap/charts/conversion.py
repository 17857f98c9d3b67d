"""Pictures of a conversion: what it costs in quality, what it gains in speed and memory."""

import itertools
import math
from collections.abc import Sequence

from attngap.charts.frame import BLUE, GRAY, GREEN, ORANGE, PURPLE, SERIES, TEAL, Row, altair, rows

Point = tuple[int | float, int | float]  # context, value
MODELS = {
    "original": GRAY,
    "converted": BLUE,
    "without features": ORANGE,
    "sinks + window only": ORANGE,
    "without held tokens": GREEN,
    "without window": TEAL,
    "random heads": PURPLE,
}
THOUSANDS = "datum.value % 1024 ? datum.label : datum.value / 1024 + 'k'"


def quality_against_length(points: Sequence[Row], title: str, form: str = ".3f", positions: int | None = None):
    """One line per part of the model over the length it was measured at. Rows: length, part, value.

    One length alone makes no line: its values are drawn side by side. `positions` marks where the model's own end.
    """
    alt = altair()
    lengths = sorted({point["length"] for point in points})
    order = _named(points)
    color = _colors(alt, order)
    y = alt.Y("value:Q", title=title, scale=alt.Scale(zero=False, nice=True), axis=alt.Axis(format=form, tickCount=5))
    tips = ["part:N", alt.Tooltip("length:Q", format=",", title="tokens"), alt.Tooltip("value:Q", format=form)]
    base = alt.Chart(rows(points))
    if len(lengths) == 1:
        across = alt.X("value:Q", title=title, scale=alt.Scale(zero=False), axis=alt.Axis(format=form, tickCount=5))
        names = alt.Y("part:N", sort=order, title=None, axis=alt.Axis(grid=True, labelLimit=0))
        dots = base.mark_point(filled=True, size=110, opacity=1).encode(x=across, y=names, color=color, tooltip=tips)
        return dots.properties(width="container", height=34 * len(order))
    x = alt.X(
        "length:Q",
        title="length of the text, tokens",
        scale=alt.Scale(type="log", base=2, nice=False, padding=14),
        axis=alt.Axis(values=lengths, labelExpr=THOUSANDS, labelOverlap=True),
    )
    lines = base.mark_line(point=alt.OverlayMarkDef(size=60)).encode(x=x, y=y, color=color, tooltip=tips)
    if positions is None or positions >= lengths[-1]:
        return lines.properties(width="container", height=280)
    end = alt.Chart(rows([{"length": positions}])).mark_rule(strokeDash=[5, 4]).encode(x=x)
    return alt.layer(lines, end).properties(width="container", height=280)


def _named(points: Sequence[Row]) -> list[str]:
    """The parts that are drawn, those we know first and always in the same order."""
    found = dict.fromkeys(point["part"] for point in points)
    return [name for name in MODELS if name in found] + [name for name in found if name not in MODELS]


def _colors(alt, names: Sequence[str]):
    """The same color for a part in every picture; parts of other names take what is left."""
    spare = itertools.cycle(SERIES)
    scale = alt.Scale(domain=list(names), range=[MODELS.get(name) or next(spare) for name in names])
    return alt.Color("part:N", scale=scale, title=None, legend=alt.Legend(orient="top", labelLimit=0))


def quality_against_kept(points: Sequence[Row], title: str):
    """Several conversions of one model: one line per part over the share of heads that keep softmax.

    Rows: kept (a share), part, value.
    """
    alt = altair()
    return (
        alt.Chart(rows(points))
        .mark_line(point=alt.OverlayMarkDef(size=90), strokeDash=[2, 5], strokeWidth=1)  # nothing is measured between
        .encode(
            x=alt.X("kept:Q", title="share of heads that keep softmax", axis=alt.Axis(format="%", tickCount=5)),
            y=alt.Y("value:Q", title=title, scale=alt.Scale(zero=False)),
            color=_colors(alt, _named(points)),
            tooltip=["part:N", alt.Tooltip("kept:Q", format=".1%"), alt.Tooltip("value:Q", format=".4f")],
        )
        .properties(width="container", height=260)
    )


def predicted_quality(
    points: Sequence[Row], title: str, form: str, chosen: int | None = None, measured: Row | None = None
):
    """A figure that a plan predicts for every number of kept heads, its interval as a band; the choice dashed.

    Rows: kept, value, low, high; `measured` (kept, value) is what a conversion turned out to have. The choice is the
    parameter "chosen", for a page that moves it.
    """
    alt = altair()
    base = alt.Chart(rows(points, ["kept", "value", "low", "high"]))
    width = [f(point["kept"] for point in points) for f in (min, max)]
    scale = alt.Scale(domain=width, nice=False)
    x = alt.X("kept:Q", title="heads that keep softmax", scale=scale, axis=alt.Axis(tickCount=6))
    axis = alt.Axis(format=form, tickCount=5)
    band = base.mark_area(opacity=0.22, color=BLUE).encode(
        x=x, y=alt.Y("low:Q", title=title, axis=axis, scale=alt.Scale(zero=False)), y2="high:Q"
    )
    tips = [alt.Tooltip("kept:Q", title="heads kept")]
    tips += [alt.Tooltip(f"{name}:Q", format=form) for name in ("value", "low", "high")]
    line = base.mark_line(color=BLUE).encode(x=x, y=alt.Y("value:Q", title=title, axis=axis), tooltip=tips)
    one = alt.Chart(rows([{}]))
    here = alt.param(name="chosen", value=chosen)
    layers = [band, line]
    if chosen is not None:
        layers.append(one.mark_rule(strokeDash=[5, 4]).encode(x=alt.XDatum(alt.expr("chosen"), type="quantitative")))
    if measured:
        dot = alt.Chart(rows([measured], ["kept", "value"])).mark_point(
            filled=True, shape="diamond", size=130, color=ORANGE, opacity=1
        )
        layers.append(
            dot.encode(x=x, y=alt.Y("value:Q", title=title), tooltip=["kept:Q", alt.Tooltip("value:Q", format=form)])
        )
    return alt.layer(*layers).add_params(here).properties(width="container", height=240)


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
            x=alt.X(
                "kept:Q", title="heads that keep softmax", scale=alt.Scale(nice=False), axis=alt.Axis(tickCount=10)
            ),
            y=alt.Y(
                "damage:Q", title="predicted damage, nats per token", scale=alt.Scale(type="symlog", constant=0.01)
            ),
            color=alt.Color("kind:N", scale=colors, title=None, legend=alt.Legend(orient="top")),
            tooltip=["kind:N", "kept:Q", alt.Tooltip("damage:Q", format=".3g")],
        )
    )
    if chosen is None:
        return lines.properties(width="container", height=260)
    mark = alt.Chart(rows([{"kept": chosen}])).mark_rule(strokeDash=[5, 4]).encode(x="kept:Q")
    return alt.layer(lines, mark).properties(width="container", height=260)


def against_context(points: Sequence[Row], title: str, between: Sequence[int | float] | None = None):
    """One line per model over context, both axes in logarithms; `between` shades where the converted model overtakes.

    Rows: context, part, value.
    """
    alt = altair()
    contexts = sorted({point["context"] for point in points})
    ladder = _ladder([point["value"] for point in points])
    x = alt.X(
        "context:Q",
        title="context, tokens",
        scale=alt.Scale(type="log", base=2),
        axis=alt.Axis(values=contexts, labelExpr=THOUSANDS, labelOverlap=True),
    )
    lines = (
        alt.Chart(rows(points))
        .mark_line(point=alt.OverlayMarkDef(size=60))
        .encode(
            x=x,
            y=alt.Y(
                "value:Q",
                title=title,
                scale=alt.Scale(type="log", nice=False, domain=[ladder[0], ladder[-1]]),
                axis=alt.Axis(values=ladder, format="~g"),
            ),
            color=_colors(alt, _named(points)),
            tooltip=[
                "part:N",
                alt.Tooltip("context:Q", format=",", title="tokens"),
                alt.Tooltip("value:Q", format=",.3~r", title=title),
            ],
        )
    )
    if between is None:
        return lines.properties(width="container", height=240)
    low, high = between
    band = alt.Chart(rows([{"context": low, "end": high}])).mark_rect(color=GRAY, opacity=0.15).encode(x=x, x2="end:Q")
    return alt.layer(band, lines).properties(width="container", height=240)


def _ladder(values: Sequence[float]) -> list[float]:
    """1, 2, 5, 10, 20, ... around the values, powers of ten alone where that would be more than an axis carries.

    >>> _ladder([7.0, 160.0])
    [5.0, 10.0, 20.0, 50.0, 100.0, 200.0]
    """
    low, high = (math.floor(math.log10(f(values))) for f in (min, max))
    steps = [float(f"{digit}e{power}") for power in range(low, high + 2) for digit in (1, 2, 5)]
    first = max(place for place, step in enumerate(steps) if step <= min(values))
    last = min(place for place, step in enumerate(steps) if step >= max(values))
    if last - first <= 8:
        return steps[first : last + 1]
    return [float(f"1e{power}") for power in range(low, math.ceil(math.log10(max(values))) + 1)]


def overtakes(first: Sequence[Point], second: Sequence[Point]) -> tuple[int | float, int | float] | None:
    """The two neighboring measured contexts between which `second` overtakes `first`; None if it does not.

    What happens between them was not measured: one run's straight line would claim a context that nobody saw.

    >>> overtakes([(1024, 20.0), (4096, 5.0)], [(1024, 10.0), (4096, 10.0)])
    (1024, 4096)
    """
    other = dict(second)
    lead = [(x, other[x] >= y) for x, y in sorted(first) if x in other]
    for (before, behind), (after, ahead) in itertools.pairwise(lead):
        if ahead and not behind:
            return before, after
    return None
