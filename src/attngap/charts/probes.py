"""Pictures of probe runs."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

from attngap.charts.frame import GRAY, SERIES, Row, altair, rows

LINE = 0.045  # height of a line of text, as a share of the picture's
COLORS = (*SERIES[:-1], "#8c6d31")
COLUMN = 0.12  # labels whose points are closer than this, as a share of the width, must not overlap


def score_against_state(points: Sequence[Row], metric: str, chance: float, best: float | None):
    """One point a mechanism and size, with its confidence interval; dotted is what theory predicts for that state.

    Rows: mechanism, state_floats, score, low, high, predicted. Mechanisms at several sizes get a color and a line, the
    others stay gray; each has its name beside its last point, so that no legend of twenty colors is needed.
    """
    alt = altair()
    several = [name for name in _names(points) if sum(point["mechanism"] == name for point in points) > 1]
    colors = dict(zip(several, itertools.cycle(COLORS), strict=False))
    points = [{**point, "color": colors.get(point["mechanism"], GRAY)} for point in points]
    low, high = (f(point["state_floats"] for point in points) for f in (min, max))
    scale = alt.Scale(type="log", domain=[low * 0.9, max(high, 2 * low) * 1.5], nice=False)
    axis = alt.Axis(tickCount=4, format="~s")
    x = alt.X("state_floats:Q", scale=scale, title="state after the whole sequence, floats", axis=axis)
    heights = [point["score"] for point in points] + [chance] + ([] if best is None else [best])
    room = LINE * (max(heights) - min(heights))
    # An interval over two seeds can be many times the picture: it is cut at the frame.
    frame = alt.Scale(domain=[min(heights) - room, max(heights) + 2 * room], nice=False)
    y = alt.Y("score:Q", title=metric, scale=frame)
    color = alt.Color("color:N", scale=None)
    base = alt.Chart(rows(points))
    tips = ["mechanism:N", alt.Tooltip("score:Q", format=".3f"), alt.Tooltip("state_floats:Q", format=",")]
    levels = [{"level": chance, "name": "chance"}]
    if best is not None:
        levels.append({"level": best, "name": "best"})
    level = alt.Chart(rows(levels))
    layers = [
        level.mark_rule(strokeDash=[2, 3], color=GRAY).encode(y="level:Q"),
        level.mark_text(align="right", dx=-2, dy=-6, color=GRAY).encode(
            x=alt.value("width"), y="level:Q", text="name:N"
        ),
        base.mark_rule(strokeWidth=2, opacity=0.5, clip=True).encode(
            x=x, y=alt.Y("low:Q", title=metric), y2="high:Q", color=color
        ),
        base.mark_line(strokeWidth=1.5).encode(x=x, y=y, color=color, detail="mechanism:N"),
        base.mark_point(filled=True, size=50, opacity=1).encode(x=x, y=y, color=color, tooltip=tips),
    ]
    # A name stands on the side where there is room for it.
    middle = math.sqrt(low * max(high, 2 * low))
    labels = place_labels(points, max(heights) + room)
    sides: tuple[tuple[Any, int, bool], ...] = (("left", 7, False), ("right", -7, True))
    for align, dx, right in sides:
        here = [label for label in labels if (label["state_floats"] > middle) == right]
        words = alt.Chart(rows(here)).mark_text(align=align, dx=dx)
        layers.append(words.encode(x=x, y=alt.Y("place:Q", title=metric), text="mechanism:N", color=color))
    limit = _predicted(points)
    if not limit:
        return alt.layer(*layers).properties(width="container", height=280)
    line = alt.Chart(rows(limit, ["state_floats", "predicted"])).mark_line(strokeDash=[1, 3], strokeWidth=2, color=GRAY)
    # Named above the frame: inside there is no place that is free in every picture.
    named = alt.TitleParams(
        "dotted line: predicted for a random memory", anchor="start", color=GRAY, fontWeight="normal", fontSize=11
    )
    layers.append(line.encode(x=x, y=alt.Y("predicted:Q", title=metric)))
    return alt.layer(*layers).properties(width="container", height=280, title=named)


def _predicted(points: Sequence[Row]) -> list[Row]:
    """The limit for random memories: of several ranks at about one size, the lower one is drawn."""
    known: dict[int, Row] = {}
    for point in sorted(points, key=lambda point: -(point.get("predicted") or 0.0)):
        if point.get("predicted") is not None:
            known[point["state_floats"]] = point
    return list(known.values())


def place_labels(points: Sequence[Row], top: float) -> list[Row]:
    """The largest point of each mechanism with `place`, the height of its name: near the point, clear of the others.

    Names are stacked upward and, where that would lead beyond `top`, downward from there.
    """
    last = [max((p for p in points if p["mechanism"] == n), key=lambda p: p["state_floats"]) for n in _names(points)]
    scores = [point["score"] for point in points]
    line = LINE * max(max(scores) - min(scores), 1e-9)
    sizes = [math.log(point["state_floats"]) for point in points]
    column = COLUMN * max(max(sizes) - min(sizes), 1e-9)

    def near(point: Row, others: list[Row]) -> list[float]:
        here = math.log(point["state_floats"])
        return [p["place"] for p in others if abs(math.log(p["state_floats"]) - here) <= column]

    upward: list[Row] = []
    for point in sorted(last, key=lambda point: point["score"]):
        upward.append({**point, "place": max([point["score"], *(place + line for place in near(point, upward))])})
    placed: list[Row] = []
    for point in reversed(upward):
        placed.append({**point, "place": min([point["place"], top, *(place - line for place in near(point, placed))])})
    return placed


def _names(points: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(point["mechanism"] for point in points))
