"""Pictures of the separation law."""

from collections.abc import Sequence

from attngap.charts.frame import BLUE, ORANGE, TEAL, Row, altair, rows

KERNELS = {"softmax": ORANGE, "linear": BLUE, "polynomial": TEAL}


def success_curves(points: Sequence[Row] | None = None, needle: float = 0.7, critical: float = 0.618):
    """Success against the needle, one line per kernel. Rows: needle, kernel, success.

    Without rows the data is named "law", for a page that fills it in; `needle` and `critical` are parameters too.
    """
    alt = altair()
    data = alt.NamedData("law") if points is None else rows(points)
    here, limit = alt.param(name="needle", value=needle), alt.param(name="critical", value=critical)
    colors = alt.Scale(domain=list(KERNELS), range=list(KERNELS.values()))
    x = alt.X("needle:Q", title="needle a", scale=alt.Scale(domain=[0.1, 1.5], nice=False))
    lines = (
        alt.Chart(data)
        .mark_line(strokeWidth=2.5)
        .encode(
            x=x,
            y=alt.Y("success:Q", title="probability of success", scale=alt.Scale(domain=[0, 1])),
            color=alt.Color("kernel:N", title=None, legend=alt.Legend(orient="top"), scale=colors),
            tooltip=["kernel:N", alt.Tooltip("needle:Q", format=".2f"), alt.Tooltip("success:Q", format=".4f")],
        )
    )
    one = alt.Chart(rows([{}]))
    now = one.mark_rule(strokeWidth=1.5).encode(x=alt.XDatum(alt.expr("needle"), type="quantitative"))
    edge = one.mark_rule(strokeDash=[5, 4]).encode(x=alt.XDatum(alt.expr("critical"), type="quantitative"))
    return alt.layer(lines, now, edge).add_params(here, limit).properties(width="container", height=260)
