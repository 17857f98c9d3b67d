"""Measure what the estimates predict: replace one head for real and compare the model's predictions."""

from typing import Any

import torch
from jaxtyping import Float, Int
from scipy.stats import spearmanr
from torch import Tensor

from attngap.diagnosis.damage import embedding, run
from attngap.diagnosis.replacement import output
from attngap.diagnosis.result import Head, Verification
from attngap.diagnosis.sequences import sequences
from attngap.diagnosis.stages import Job, load_fit
from attngap.errors import AttngapError
from attngap.models.capture import Call, capture
from attngap.progress import progress


def verify(job: Job, heads: list[Head], tokens: Int[Tensor, "p t"], count: int) -> Verification:
    """Replace `count` heads one at a time, spread evenly over the order of estimated damage, both ends included."""
    able = sorted((head for head in heads if head.replaceable), key=lambda head: -(head.damage or 0.0))
    if not able:
        raise AttngapError("No head of this model can be replaced, so there is nothing to verify. Leave out --verify")
    places = sorted({round(i * (len(able) - 1) / max(1, count - 1)) for i in range(min(count, len(able)))})
    chosen = [able[place] for place in places]
    with progress("verifying, real replacements", len(chosen), quiet=job.quiet) as advance, torch.no_grad():
        plain = [predictions(run(job.model, row[None])) for row in tokens]
        for head in chosen:
            piece = job.work.piece(f"verify-{head.id}")
            if piece is None:
                losses = [
                    replaced_loss(job, row[None], before, head) for row, before in zip(tokens, plain, strict=True)
                ]
                piece = {"loss": torch.stack(losses)}
                job.work.keep(f"verify-{head.id}", piece)
            head.measured = float(piece["loss"].mean())
            advance(note=f"head {head.id}")
    measured, estimated = [head.measured or 0.0 for head in chosen], [head.damage or 0.0 for head in chosen]
    return Verification(
        heads=[head.id for head in chosen],
        measured=measured,
        estimated=estimated,
        spearman=_spearman(measured, estimated),
        passages=len(tokens),
        context=tokens.shape[1],
    )


def _spearman(a: list[float], b: list[float]) -> float | None:
    """None where one of them is constant, and a rank correlation is not defined."""
    if min(len(set(a)), len(set(b))) < 2:
        return None
    found: Any = spearmanr(a, b)
    return float(found.statistic)


def predictions(result) -> Tensor:
    """Log-probabilities of every token, or the embedding of an encoder."""
    logits = getattr(result, "logits", None)
    return embedding(result)[0] if logits is None else logits[0].log_softmax(-1)


def replaced_loss(job: Job, tokens: Int[Tensor, "1 t"], before: Tensor, head: Head) -> Float[Tensor, ""]:
    """KL to the untouched model in nats a token; for an encoder the squared change of its embedding."""

    def watch(call: Call) -> Tensor | None:
        if call.cross or call.layer != head.layer:
            return None
        (one,) = sequences(call)
        candidate = load_fit(job, call.layer, one)
        assert candidate is not None, head.id
        changed = call.output.clone()
        changed[0, head.head] = output(candidate, one)[head.head]
        return changed

    with capture(job.model, watch):
        after = predictions(run(job.model, tokens))
    if before.ndim == 1:
        return (after - before).square().sum()
    return (before.exp() * (before - after)).sum(-1).mean()
