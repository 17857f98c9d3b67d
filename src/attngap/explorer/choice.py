"""What another share of kept heads would cost, from a stored plan: the slider and its answer."""

from typing import Any

from attngap.report.page import Form, Input, Panels, Section
from attngap.report.sections.plan import KEY, charts_of, chosen_point, said

Row = dict[str, Any]
FACTS = [
    ("share", "of heads keep softmax"),
    ("perplexity", "times the original's perplexity"),
    ("recall", "of its recall"),
]


def section(plan: Row | None) -> list[Section]:
    """None without a plan that predicts anything."""
    if plan is None:
        return []
    most = max(point["kept"] for point in plan["curve"])
    slider = Input("range", "kept", "heads that keep softmax", chosen_point(plan)["kept"], 0, most, 1)
    form = Form("choice-form", [slider], FACTS)
    caption = (
        "The flatter a line, the less a further head saves. Predicted from a few joint replacements with the quick "
        "fits of the diagnosis, at its own length; a conversion fits longer."
    )
    key = [*KEY[:-1], ("choice", "the slider")]
    drawn = Panels("choice", "Predicted perplexity and recall", charts_of(plan, "choice"), caption, key, wide=True)
    lead = f"How many heads of {plan['model']['name']} keep softmax, and what the plan expects of the converted model."
    return [Section("choice-section", "The choice", [form, drawn], lead)]


def answer(plan: Row, kept: int) -> Row:
    """The point of the curve nearest to that many kept heads, in numbers and in a sentence."""
    most = max(point["kept"] for point in plan["curve"])
    point = min(plan["curve"], key=lambda point: abs(point["kept"] - kept))
    figures = {key: point.get(key) for key in ("perplexity_ratio", "recalled")}
    return {"kept": point["kept"], "share": point["kept"] / max(1, most), "sentence": said(point, most), **figures}
