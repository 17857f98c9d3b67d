"""The theory's phase diagram."""

from typing import Any

from attngap.charts.phase import AXES, panels
from attngap.report.page import Block, Chart, Panels, Section, Text
from attngap.report.results import Results

HEIGHT = 200
KEY = {"viridis": "probability of success, 0 to 1"}


def theory_sections(results: Results) -> list[Section]:
    blocks: list[Block] = []
    for number, phase in enumerate(results.of("phase"), 1):
        setting = phase.content["setting"]
        fixed = f"d = {setting['d']}, m = {setting['m']}, b = {setting['b']:g}, a0 = {setting['a0']:g}"
        blocks += [
            _diagram(
                phase.content["scale"],
                "scale",
                f"phase-{number}-scale",
                f"Which needle is found among {setting['n']:,} tokens",
                "Yellow is found for certain. Softmax finds what lies above the red curve, and a larger scale lowers "
                f"it; linear weights do not depend on the scale. Exact; {fixed}.",
            ),
            _diagram(
                phase.content["length"],
                "n",
                f"phase-{number}-n",
                "Which needle is found as the context grows",
                "At scale 1 softmax finds a needle above 0.618 at any length, and a somewhat smaller one while the "
                f"context is finite; a fixed score ratio is lost as the context grows. Exact; {fixed}.",
            ),
        ]
    caveat = (
        "A construction in the style of arXiv 2310.11685, with its weights: other weights let linear attention "
        "separate too, at the price of a score ratio that grows with n where softmax needs a logit gap of log n."
    )
    return [Section("theory", "Why", [*blocks, Text([caveat], "note")])] if blocks else []


def _diagram(part: dict[str, Any], axis: str, id: str, title: str, caption: str) -> Panels:
    drawn = panels(part["cells"], part["curves"], axis, legend=False)
    small = [
        Chart(
            f"{id}-{place}",
            kernel,
            f"Probability that {kernel} finds the needle, over its size and the {AXES[axis][0]}",
            chart.properties(width="container", height=HEIGHT).to_dict(),
        )
        for place, (kernel, chart) in enumerate(drawn.items())
    ]
    names = list(dict.fromkeys(row["curve"] for row in part["curves"]))
    key = [*KEY.items(), *zip(("solid", "dashed", "dashed"), names, strict=False)]
    return Panels(id, title, small, caption, key)
