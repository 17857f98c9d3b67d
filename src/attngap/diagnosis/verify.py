"""Measure what the estimates predict: replace one head for real and compare the model's predictions."""

from typing import Any

from jaxtyping import Int
from scipy.stats import spearmanr
from torch import Tensor

from attngap.diagnosis.replaced import replacement_losses
from attngap.diagnosis.result import Head, Verification
from attngap.diagnosis.run import STRESS, DiagnosisRun
from attngap.errors import AttngapError
from attngap.progress import progress


def verify(
    run: DiagnosisRun, heads: list[Head], text: Int[Tensor, "p t"], stress: Int[Tensor, "1 s"], count: int
) -> Verification:
    """Replace `count` heads one at a time, spread evenly over the order of estimated damage, both ends included."""
    able = sorted((head for head in heads if head.replaceable), key=lambda head: -(head.damage or 0.0))
    if not able:
        raise AttngapError("No head of this model can be replaced, so there is nothing to verify. Leave out --verify")
    places = sorted({round(i * (len(able) - 1) / max(1, count - 1)) for i in range(min(count, len(able)))})
    chosen = [able[place] for place in places]
    passages = {str(i): row[None] for i, row in enumerate(text)} | {STRESS: stress}
    with progress("verifying, real replacements", len(chosen) * len(passages), quiet=run.quiet) as advance:
        losses = {
            name: replacement_losses(run, f"verify-{name}", tokens, chosen, advance)
            for name, tokens in passages.items()
        }
    recall = losses.pop(STRESS)
    for place, head in enumerate(chosen):
        head.measured = sum(found[place] for found in losses.values()) / len(losses)
        head.recall_measured = recall[place]
    measured, estimated = [head.measured or 0.0 for head in chosen], [head.damage or 0.0 for head in chosen]
    return Verification(
        heads=[head.id for head in chosen],
        measured=measured,
        estimated=estimated,
        spearman=_spearman(measured, estimated),
        recall_spearman=_spearman(recall, [head.recall_damage or 0.0 for head in chosen]),
        passages=len(text),
        context=text.shape[1],
    )


def _spearman(a: list[float], b: list[float]) -> float | None:
    """None where one of them is constant, and a rank correlation is not defined."""
    if min(len(set(a)), len(set(b))) < 2:
        return None
    found: Any = spearmanr(a, b)
    return float(found.statistic)
