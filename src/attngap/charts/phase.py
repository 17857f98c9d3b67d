"""Pictures of the theory: phase diagrams and selectivity thresholds, from plain rows."""

import csv
import io
import itertools
from collections.abc import Sequence
from typing import Any

from attngap.charts.frame import Row, altair

AXES: dict[str, tuple[str, Any]] = {"scale": ("logit scale s", "linear"), "n": ("context n, tokens", "log")}
GOLDEN = 0.6180339887498949
# Powers of ten as people write them.
POWERS: dict[str, Any] = {
    "values": [1e3, 1e6, 1e9, 1e12, 1e15],
    "labelExpr": "'10' + ['³', '⁶', '⁹', '¹²', '¹⁵'][round(log(datum.value) / LN10) / 3 - 1]",
}


def panels(cells: Sequence[Row], curves: Sequence[Row], axis: str, *, legend: bool = True) -> dict[str, Any]:
    """Success over (axis, needle) with the critical curves on top, one chart per kernel. `axis` is "scale" or "n".

    Cells are rows of kernel, axis, needle, success; curves rows of kernel, axis, needle, curve.
    """
    alt = altair()
    title, scale = AXES[axis]
    xs, ys = (sorted({row[name] for row in cells}) for name in (axis, "needle"))
    across, along = _edges(xs, scale == "log"), _edges(ys, False)
    domain = {"x": [across[xs[0]][0], across[xs[-1]][1]], "y": [along[ys[0]][0], along[ys[-1]][1]]}
    x = alt.X(
        "x:Q",
        title=title,
        scale=alt.Scale(type=scale, domain=domain["x"], nice=False, clamp=True),
        axis=alt.Axis(
            grid=False, labelOverlap=True, **(POWERS if scale == "log" else {"format": "~g", "tickCount": 4})
        ),
    )
    y = alt.Y(
        "y:Q",
        title="needle a",
        scale=alt.Scale(domain=domain["y"], nice=False, clamp=True),
        axis=alt.Axis(grid=False, tickCount=5),
    )
    heat = alt.Color("success:Q", title="success", scale=alt.Scale(scheme="viridis", domain=[0, 1]), **_legend(legend))
    dashes = _dashes(list(dict.fromkeys(row["curve"] for row in curves)), legend)
    found = {}
    for kernel in dict.fromkeys(row["kernel"] for row in cells):
        squares = [
            _rounded(
                x=across[row[axis]][0],
                x2=across[row[axis]][1],
                y=along[row["needle"]][0],
                y2=along[row["needle"]][1],
                success=row["success"],
            )
            for row in cells
            if row["kernel"] == kernel
        ]
        points = [
            _rounded(x=row[axis], y=row["needle"]) | {"curve": row["curve"]}
            for row in curves
            if row["kernel"] == kernel and domain["y"][0] <= row["needle"] <= domain["y"][1]
        ]
        area = alt.Chart(table(squares)).mark_rect().encode(x=x, x2="x2:Q", y=y, y2="y2:Q", color=heat)
        area = area.encode(tooltip=[alt.Tooltip("success:Q", format=".4g")])
        line = alt.Chart(table(points)).mark_line(clip=True, strokeWidth=2)
        line = line.encode(x=x, y=y, strokeDash=dashes, detail="curve:N", color=alt.value("#e0393b"))
        found[kernel] = area + line
    return found


def diagram(cells: Sequence[Row], curves: Sequence[Row], axis: str, *, width: int = 190, height: int = 190) -> Any:
    """The panels in a row, for a picture of its own."""
    drawn = panels(cells, curves, axis)
    sized = [chart.properties(title=kernel, width=width, height=height) for kernel, chart in drawn.items()]
    return altair().hconcat(*sized)


def thresholds(rows: Sequence[Row], *, width: int = 520, height: int = 320) -> Any:
    """Selectivity threshold against n, one line per mechanism; those that never separate are listed in the subtitle."""
    alt = altair()
    found = [row for row in rows if row["needle"] is not None]
    never = sorted({row["label"] for row in rows} - {row["label"] for row in found})
    subtitle = [f"never up to the largest needle tried: {', '.join(never)}"] if never else []
    lines = (
        alt.Chart(table(found))
        .mark_line(point=True)
        .encode(
            x=alt.X("n:Q", title="context length n", scale=alt.Scale(type="log", base=2)),
            y=alt.Y("needle:Q", title="smallest needle that separates"),
            color=alt.Color("label:N", title="mechanism"),
            tooltip=["label:N", "n:Q", alt.Tooltip("needle:Q", format=".3f")],
        )
    )
    limit = alt.Chart(table([{"needle": GOLDEN}])).mark_rule(strokeDash=[4, 4], color="#888").encode(y="needle:Q")
    title = alt.TitleParams("Selectivity threshold; dashes: 0.618, softmax for n to infinity", subtitle=subtitle)
    return (lines + limit).properties(width=width, height=height, title=title)


def phase_chart(result: dict[str, Any]) -> Any:
    """Both diagrams of `attngap theory phase`, one above the other."""
    alt = altair()
    setting = result["setting"]
    over_scale = diagram(result["scale"]["cells"], result["scale"]["curves"], "scale")
    over_length = diagram(result["length"]["cells"], result["length"]["curves"], "n")
    fixed = f"d = {setting['d']}, m = {setting['m']}, b = {setting['b']:g}, a0 = {setting['a0']:g}"
    caveat = "Linear and polynomial with the weight X = 11^T; linear attention with another weight separates too."
    first = alt.TitleParams(f"Probability of separating, n = {setting['n']:,}; {fixed}", subtitle=caveat)
    return alt.vconcat(
        over_scale.properties(title=first),
        over_length.properties(title=f"Probability of separating, scale 1; {fixed}"),
    ).resolve_scale(color="shared")


def table(rows: Sequence[Row]) -> Any:
    """Rows as inline CSV: Altair copies a chart's data at every step, and one string copies faster than rows do."""
    alt = altair()
    names = list(rows[0]) if rows else []
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    writer.writerows([row[name] for name in names] for row in rows)
    return alt.InlineData(values=text.getvalue(), format=alt.CsvDataFormat(type="csv"))


def _legend(wanted: bool) -> dict[str, Any]:
    return {"legend": altair().Legend(labelLimit=0)} if wanted else {"legend": None}


def _dashes(names: Sequence[str], legend: bool) -> Any:
    alt = altair()
    styles = [[1, 0], [5, 4], [2, 2]]
    scale = alt.Scale(domain=list(names), range=styles[: len(names)])
    return alt.StrokeDash("curve:N", title="curve", scale=scale, **_legend(legend))


def _edges(values: Sequence[int | float], log: bool) -> dict[int | float, tuple[float, float]]:
    """Halfway to the neighbors on each side, in the axis's own scale."""
    if len(values) == 1:
        return {values[0]: (values[0] * 0.9, values[0] * 1.1)}

    def middle(a: int | float, b: int | float) -> float:
        return (a * b) ** 0.5 if log else (a + b) / 2

    inner = [middle(a, b) for a, b in itertools.pairwise(values)]
    first = values[0] ** 2 / inner[0] if log else 2 * values[0] - inner[0]
    last = values[-1] ** 2 / inner[-1] if log else 2 * values[-1] - inner[-1]
    bounds = [first, *inner, last]
    return {value: (bounds[i], bounds[i + 1]) for i, value in enumerate(values)}


def _rounded(**row: int | float) -> Row:
    """Five digits: what a picture can show, at half the size."""
    return {name: float(f"{x:.5g}") for name, x in row.items()}
