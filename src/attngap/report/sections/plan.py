"""What a plan predicts for every number of kept heads."""

from attngap.charts import conversion as charts
from attngap.report.page import Block, Chart, Section
from attngap.report.results import Results


def plan_sections(results: Results) -> list[Section]:
    blocks: list[Block] = []
    for number, plan in enumerate(results.of("plan")):
        curve = plan.content.get("curve") or []
        if not curve:
            continue
        points = [
            {"kept": point["kept"], "kind": kind, "damage": point[key]}
            for point in curve
            for kind, key in (("text", "text"), ("repeated sequence", "recall"))
        ]
        kept = len(plan.content["keep"])
        caption = (
            f"How much each further kept head saves; dashed: the plan in {plan.path}, {kept} heads. Second-order "
            "estimates of single heads, added up: errors interact."
        )
        spec = charts.predicted_damage(points, kept).to_dict()
        alt = "Damage predicted for every number of kept heads"
        blocks.append(Chart(f"plan-{number + 1}", "Predicted damage against heads kept", alt, spec, caption))
    return [Section("plan", "The choice", blocks)] if blocks else []
