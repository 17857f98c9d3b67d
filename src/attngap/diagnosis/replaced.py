"""The model with some of its heads replaced for real, by the replacements that the diagnosis fitted."""

import contextlib
from collections.abc import Callable, Mapping, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attngap.diagnosis.replay import Replay
from attngap.diagnosis.result import Head
from attngap.diagnosis.run import DiagnosisRun
from attngap.diagnosis.stages import load_fit
from attngap.diagnosis.tasks import Task, performing
from attngap.heads.forward import embedding, forward
from attngap.heads.inputs import layer_inputs
from attngap.heads.replacement import output
from attngap.models.capture import Call, capture

ROWS = 128  # whose divergence is summed at once
HEADS = 4  # replaced by one job on a cluster, which runs the untouched model once for all of them


def predictions(result) -> Tensor:
    """Log-probabilities of every token, or the embedding of an encoder."""
    logits = getattr(result, "logits", None)
    return embedding(result)[0] if logits is None else logits[0].log_softmax(-1)


@torch.no_grad()
def replaced_predictions(
    run: DiagnosisRun, tokens: Int[Tensor, "1 t"], heads: Mapping[int, Sequence[int]], replay: Replay | None = None
) -> Tensor:
    """What the model predicts with these heads replaced, by layer; a replay spares the layers before the first."""
    start = contextlib.nullcontext(0) if replay is None else replay.until(min(heads))
    with start as skipped, capture(run.model, _replace(run, heads, skipped)):
        return predictions(forward(run.model, tokens))


def replacement_losses(
    run: DiagnosisRun, name: str, tokens: Int[Tensor, "1 t"], heads: Sequence[Head], advance: Callable[..., None]
) -> list[float]:
    """What replacing each head alone costs on a passage; what a killed run measured as `name` is not measured again."""
    missing = [head for head in heads if not run.checkpoint.has(f"{name}-{head.id}")]
    advance(len(heads) - len(missing))
    size = len(missing) if run.cluster is None else HEADS
    with performing(run, advance) as perform:
        for start in range(0, len(missing), max(1, size)):
            part = missing[start : start + size]
            note = f"heads {', '.join(head.id for head in part)}"
            perform(Task(_replace_each, (name, tokens, part), note=note, steps=len(part), fits=True))
    return [float(run.checkpoint.require(f"{name}-{head.id}")["loss"]) for head in heads]


@torch.no_grad()
def _replace_each(
    run: DiagnosisRun, name: str, tokens: Int[Tensor, "1 t"], heads: Sequence[Head], advance: Callable[..., None]
) -> None:
    replay = Replay(run.model, tokens)
    before = predictions(replay.record(lambda: forward(run.model, tokens)))
    for head in heads:
        after = replaced_predictions(run, tokens, {head.layer: [head.head]}, replay)
        run.checkpoint.put(f"{name}-{head.id}", {"loss": divergence(before, after)})
        advance(note=f"head {head.id}")


def _replace(run: DiagnosisRun, heads: Mapping[int, Sequence[int]], skipped: int) -> Callable[[Call], Tensor | None]:
    def watch(call: Call) -> Tensor | None:
        layer = call.layer + skipped
        if call.cross or not heads.get(layer):
            return None
        (one,) = layer_inputs(call)
        candidate = load_fit(run, layer, one)
        assert candidate is not None, layer
        changed, chosen = call.output.clone(), list(heads[layer])
        changed[0, chosen] = output(candidate, one)[chosen].to(changed.dtype)
        return changed

    return watch


def divergence(before: Tensor, after: Tensor) -> Float[Tensor, ""]:
    """KL to the untouched model in nats per token; for an encoder the squared change of its embedding."""
    if before.ndim == 1:
        return (after - before).square().sum()
    parts = zip(before.split(ROWS), after.split(ROWS), strict=True)
    found = torch.cat([(a.exp() * (a - b)).sum(-1) for a, b in parts]).mean()
    return found.clamp(min=0.0)  # rounding may leave nothing at all below nothing
