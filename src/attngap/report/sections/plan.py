"""What a plan predicts for every number of kept heads."""

from collections.abc import Iterable, Sequence
from typing import Any

from attngap.charts import conversion as charts
from attngap.report.page import Block, Chart, Column, Panels, Section, Table
from attngap.report.results import Result, Results

Row = dict[str, Any]
SHARES = (0.0, 0.02, 0.05, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0)  # of heads kept, where a table looks
FIGURES = {  # field of a point: its name and the axis under it, how it is written there
    "perplexity_ratio": ("Perplexity", "times the original's", ".3f"),
    "recalled": ("Recall", "share of what the original predicts", ".0%"),
}
KEY = [("line", "predicted"), ("band", "nine measurements of ten should fall here"), ("choice", "this plan")]
COLUMNS = (
    Column("kept", "heads kept", ",.0f"),
    Column("share", "share", ".0%"),
    Column("perplexity_ratio", "perplexity, x original", ".3f"),
    Column("perplexity_ratio_low", "from", ".3f", "nine measurements of ten should lie between"),
    Column("perplexity_ratio_high", "to", ".3f", "nine measurements of ten should lie between"),
    Column("recalled", "recall, of the original's", ".0%", "share of its predictions on a repeated random sequence"),
    Column("recalled_low", "from", ".0%", "nine measurements of ten should lie between"),
    Column("recalled_high", "to", ".0%", "nine measurements of ten should lie between"),
)


def plan_sections(results: Results) -> list[Section]:
    blocks: list[Block] = []
    for number, plan in enumerate(results.of("plan"), 1):
        if not plan.content.get("curve"):
            continue
        receipt = next((each for each in results.of("receipt") if each.model == plan.model), None)
        if any(figures(plan.content)):
            blocks += _predicted(plan, receipt, number)
        else:
            blocks.append(_damage(plan, number))
    return [Section("plan", "The choice", blocks)] if blocks else []


def figures(plan: Row) -> list[str]:
    """What this plan predicts: none of it where its diagnosis replaced no heads together."""
    return [key for key in FIGURES if all(point.get(key) for point in plan["curve"])]


def chosen_point(plan: Row) -> Row:
    """The point of the curve that the plan stands at; heads that cannot be replaced are not counted on the curve."""
    most = max(point["kept"] for point in plan["curve"])
    kept = len(plan["keep"]) - (plan["model"]["layers"] * plan["model"]["heads"] - most)
    return min(plan["curve"], key=lambda point: abs(point["kept"] - kept))


def levels(counts: Iterable[int], chosen: int) -> list[int]:
    """Of all numbers of kept heads those that a table shows: near the usual shares, and the chosen one."""
    known = sorted(counts)
    near = {min(known, key=lambda kept, share=share: abs(kept - share * known[-1])) for share in SHARES}
    return sorted(near | {chosen})


def said(point: Row, most: int) -> str:
    """
    >>> expected = {"value": 1.02, "low": 1.0, "high": 1.05}
    >>> said({"kept": 27, "perplexity_ratio": expected, "recalled": None}, 270)
    "With softmax on 27 of 270 heads (10%) the plan expects 1.020 times the original's perplexity (1.000 to 1.050)."
    """
    parts = []
    if ratio := point.get("perplexity_ratio"):
        between = f"({ratio['low']:.3f} to {ratio['high']:.3f})"
        parts.append(f"{ratio['value']:.3f} times the original's perplexity {between}")
    if kept := point.get("recalled"):
        parts.append(f"{kept['value']:.0%} of its recall ({kept['low']:.0%} to {kept['high']:.0%})")
    where = f"With softmax on {point['kept']:,} of {most:,} heads ({point['kept'] / max(1, most):.0%})"
    return f"{where} the plan expects {' and '.join(parts)}."


def charts_of(plan: Row, id: str, measured: Row | None = None) -> list[Chart]:
    """A small chart for each figure that is predicted; `measured` has what a conversion came to, by figure."""
    here = chosen_point(plan)["kept"]
    found = []
    for key in figures(plan):
        title, axis, form = FIGURES[key]
        points = [{"kept": point["kept"], **point[key]} for point in plan["curve"]]
        dot = (measured or {}).get(key)
        spec = charts.predicted_quality(points, f"{title.lower()}, {axis}", form, here, dot).to_dict()
        alt = f"{title} predicted for every number of heads that keep softmax, with its interval"
        found.append(Chart(f"{id}-{key}", title, alt, spec))
    return found


def _predicted(plan: Result, receipt: Result | None, number: int) -> list[Block]:
    content = plan.content
    most = max(point["kept"] for point in content["curve"])
    here = chosen_point(content)
    exact = content["replacement"]["window"]
    other = None if receipt is None else receipt.content["options"].get("window")
    measured = _measured(receipt, content, most) if other == exact else {}
    caption = f"{said(here, most)} The flatter the line, the less a further head saves."
    key = list(KEY)
    if measured and receipt:
        length = receipt.content["options"]["context"]
        key.append(("diamond", f"measured after converting, {length:,} tokens"))
        caption += f" {_inside(measured, content)}"
        if receipt.content["options"].get("held"):
            caption += " It also holds tokens from anywhere, which no prediction counts: it should do better."
    elif other is not None and other != exact:
        caption += f" That is with a window of {exact} keys: the conversion here has {other}, and is not drawn."
    caption += " Predicted from a few joint replacements with the quick fits of the diagnosis, at its own length."
    drawn = charts_of(content, f"plan-{number}", measured)
    title = "What another share would cost, predicted"
    table = Table(f"plan-{number}-table", "At other shares", _columns(content), _rows(content, most))
    return [Panels(f"plan-{number}", title, drawn, caption, key, wide=True), table]


def _measured(receipt: Result | None, plan: Row, most: int) -> Row:
    """What the conversion came to at the length it was fitted at, on the plan's own axes."""
    if receipt is None:
        return {}
    quality = receipt.content["quality"]
    after, before = quality.get("converted") or {}, quality.get("original") or {}
    total = plan["model"]["layers"] * plan["model"]["heads"]
    kept = receipt.content["kept"] - (total - most)
    found: Row = {}
    if after.get("perplexity_ratio"):
        found["perplexity_ratio"] = {"kept": kept, "value": after["perplexity_ratio"]}
    if after.get("induction") is not None and before.get("induction"):
        found["recalled"] = {"kept": kept, "value": after["induction"] / before["induction"]}
    return {key: value for key, value in found.items() if key in figures(plan)}


def _inside(measured: Row, plan: Row) -> str:
    """Does what was measured lie in the interval that was predicted for that number of heads?"""
    inside = []
    for key, dot in measured.items():
        point = min(plan["curve"], key=lambda point, kept=dot["kept"]: abs(point["kept"] - kept))[key]
        inside.append(point["low"] <= dot["value"] <= point["high"])
    if all(inside):
        return "What was measured lies within the band."
    if not any(inside):
        return "What was measured lies outside the band."
    names = [FIGURES[key][0].lower() for key in measured]
    return (
        f"Of what was measured, {names[inside.index(True)]} lies within the band, {names[inside.index(False)]} outside."
    )


def _rows(plan: Row, most: int) -> list[Row]:
    curve = {point["kept"]: point for point in plan["curve"]}
    found = []
    for kept in levels(curve, chosen_point(plan)["kept"]):
        row: Row = {"kept": kept, "share": kept / max(1, most)}
        for key in figures(plan):
            expected = curve[kept][key]
            row |= {key: expected["value"], f"{key}_low": expected["low"], f"{key}_high": expected["high"]}
        found.append(row)
    return found


def _columns(plan: Row) -> Sequence[Column]:
    known = figures(plan)
    return [column for column in COLUMNS if column.key in ("kept", "share") or column.key.startswith(tuple(known))]


def _damage(plan: Result, number: int) -> Chart:
    """All there is without joint replacements: estimates of single heads, added up."""
    points = [
        {"kept": point["kept"], "kind": kind, "damage": point[key]}
        for point in plan.content["curve"]
        for kind, key in (("text", "text"), ("repeated sequence", "recall"))
    ]
    kept = chosen_point(plan.content)["kept"]
    caption = (
        f"How much each further kept head saves; dashed: the plan in {plan.path}, {kept} heads. Second-order "
        "estimates of single heads, added up: errors interact, and perplexity is not predicted from them."
    )
    spec = charts.predicted_damage(points, kept).to_dict()
    alt = "Damage predicted for every number of kept heads"
    return Chart(f"plan-{number}", "Predicted damage against heads kept", alt, spec, caption)
