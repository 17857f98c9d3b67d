"""Pictures of probe runs."""

from collections.abc import Sequence

from attngap.charts.frame import Row, altair, rows


def score_against_state(points: Sequence[Row], metric: str, chance: float, best: float | None):
    """One point a mechanism and size, with its confidence interval; gray is what theory predicts for that state.

    Rows: mechanism, state_floats, score, low, high, predicted.
    """
    alt = altair()
    base = alt.Chart(rows(points))
    few = len({point["mechanism"] for point in points}) <= 10
    x = alt.X(
        "state_floats:Q",
        scale=alt.Scale(type="log"),
        title="state after the whole sequence, floats",
    )
    y = alt.Y("score:Q", title=metric, scale=alt.Scale(zero=False))
    color = alt.Color(
        "mechanism:N",
        scale=alt.Scale(scheme="tableau10" if few else "tableau20"),
        title=None,
        legend=alt.Legend(orient="top", columns=4),
    )
    tips = ["mechanism:N", alt.Tooltip("score:Q", format=".3f"), alt.Tooltip("state_floats:Q", format=",")]
    layers = [
        base.mark_rule(strokeWidth=2, opacity=0.6).encode(
            x=x, y=alt.Y("low:Q", title=metric), y2="high:Q", color=color
        ),
        base.mark_line(strokeWidth=1, opacity=0.6).encode(x=x, y=y, color=color),
        base.mark_point(filled=True, size=90).encode(x=x, y=y, color=color, tooltip=tips),
        alt.Chart(rows([{"level": chance}])).mark_rule(strokeDash=[2, 3]).encode(y="level:Q"),
    ]
    if best is not None:
        layers.append(alt.Chart(rows([{"level": best}])).mark_rule(strokeDash=[6, 3]).encode(y="level:Q"))
    if any(point.get("predicted") is not None for point in points):
        known = [point for point in points if point.get("predicted") is not None]
        line = alt.Chart(rows(known, ["state_floats", "predicted"])).mark_line(strokeDash=[1, 2], point=True)
        layers.append(line.encode(x=x, y=alt.Y("predicted:Q", title=metric), color=alt.value("#808892")))
    return alt.layer(*layers).properties(width="container", height=280)
