"""The answer, in a few sentences with numbers, from whatever was measured."""

from typing import Any

from attngap.probes.summary import summarize
from attngap.report.results import Result, Results
from attngap.report.sections.heads import damage_line, head_rows
from attngap.report.sections.plan import chosen_point, figures, said
from attngap.report.sections.receipts import at_longest, longest, which


def answer(results: Results) -> list[str]:
    """A measured conversion answers best; then a plan; then a diagnosis; then probes; then theory."""
    if receipts := results.of("receipt"):
        return from_receipt(receipts[0].content, which(receipts[0], receipts))
    if diagnoses := results.of("diagnosis"):
        return from_diagnosis(diagnoses[0], results.of("plan"))
    if plans := results.of("plan"):
        return from_plan(plans[0].content)
    if results.runs:
        return from_probes(results)
    return from_phase(results.of("phase"))


def from_receipt(content: dict[str, Any], name: str = "") -> list[str]:
    replaced = content["heads"] - content["kept"]
    kept = f"{content['kept']} of {content['heads']} heads"
    said = f"Keep softmax on {kept}; the other {replaced} work with a state of fixed size."
    first = f"{name}: {said}" if name else said
    parts = []
    if shown := at_longest(content, "perplexity_ratio"):
        length, here = shown
        change = here["converted"] - 1
        way = "higher" if change >= 0 else "lower"
        parts.append(f"perplexity is {abs(change):.1%} {way} on held-out text of {length:,} tokens")
    elif after := content["quality"].get("converted"):
        parts.append(f"the states change by a relative squared error of {after['divergence']:.2g}")
    for key, label in (("repetition", "recall of a repeated sequence"), ("needle", "needle recall")):
        if (shown := at_longest(content, key)) and shown[1]["original"]:
            length, here = shown
            share = here["converted"] / here["original"]
            parts.append(f"{label} is {share:.0%} of the original's at {length:,}")
    if gain := longest(content):
        saved = 1 - gain["converted"]["cache_bytes"] / gain["original"]["cache_bytes"]
        parts.append(f"the cache is {saved:.0%} smaller at {gain['context']:,} tokens")
        faster = gain["converted"]["decode"] / gain["original"]["decode"]
        parts.append(f"decoding there is {faster:.2g} times as fast")
    return [first, _sentence(parts) if parts else "What that costs and gains was not measured yet: attngap eval DIR."]


def from_diagnosis(result: Result, plans: list[Result]) -> list[str]:
    content, heads = result.content, result.content["heads"]
    counts = {name: sum(head["verdict"] == name for head in heads) for name in ("keep", "replace", "window")}
    kept = len(plans[0].content["keep"]) if plans else counts["keep"]
    first = (
        f"Keep softmax on {kept} of {len(heads)} heads; {counts['replace']} can be replaced and for "
        f"{counts['window']} more a window is enough."
    )
    ranked = head_rows(result)
    lines = [
        damage_line(ranked, "damage", "unavoidable", content["rank"]),
        damage_line(ranked, "recall_damage", "recall_unavoidable", content["rank"]),
    ]
    if not any(lines):
        far = sum(head["far"] > 0.2 for head in heads)
        return [first, f"Statistics only: {far} of {len(heads)} heads put more than 20% of their mass far away."]
    return [first, *(line for line in lines if line)]


def from_plan(content: dict[str, Any]) -> list[str]:
    total = content["model"]["layers"] * content["model"]["heads"]
    kept = len(content["keep"])
    first = f"Keep softmax on {kept} of {total} heads; the other {total - kept} are to be replaced."
    if not content.get("curve") or not figures(content):
        return [first, "What that costs was not predicted: measure it after converting."]
    return [first, said(chosen_point(content), max(point["kept"] for point in content["curve"]))]


def from_probes(results: Results) -> list[str]:
    summaries = [s for s in summarize(r for _, records in results.runs for r in records) if s.closed is not None]
    tasks = list(dict.fromkeys(summary.task for summary in summaries))
    found = []
    for task in tasks[:2]:
        ranked = sorted((s for s in summaries if s.task == task), key=lambda s: -(s.closed or 0.0))
        best, worst = ranked[0], ranked[-1]
        found.append(
            f"On {task}, {best.mechanism} goes {best.closed:.0%} of the way from chance to perfect and "
            f"{worst.mechanism} {worst.closed:.0%}."
        )
    return found


def from_phase(phases: list[Result]) -> list[str]:
    if not phases:
        return []
    n = phases[0].content["setting"]["n"]
    return [
        f"Softmax finds one needle among {n:,} tokens once its logit gap passes log n; linear attention with the same "
        "weights never does.",
        "As n grows softmax concentrates where s a (1 + a) > 1: at scale 1, a needle above 0.618.",
    ]


def _sentence(parts: list[str]) -> str:
    text = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])}, and {parts[-1]}"
    return f"{text[0].upper()}{text[1:]}."
