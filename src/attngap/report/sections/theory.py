"""The theory's phase diagram."""

from attngap.report.page import Chart, Section, Text
from attngap.report.results import Results


def theory_sections(results: Results) -> list[Section]:
    phases = results.of("phase")
    if not phases:
        return []
    from attngap.report.phase import phase_chart

    blocks = [
        Chart(
            f"phase-{number + 1}",
            "Where attention can find one needle",
            "Probability of success over needle and scale, and over length and needle, for three kernels",
            phase_chart(phase.content).to_dict(),
            "Exact. Curves: the critical needle; for softmax also where its weight tends to one.",
        )
        for number, phase in enumerate(phases)
    ]
    caveat = (
        "A construction in the style of arXiv 2310.11685, with its weights: other weights let linear attention "
        "separate too, at the price of a score ratio that grows with n where softmax needs a logit gap of log n."
    )
    return [Section("theory", "Why", [*blocks, Text([caveat], "note")])]
