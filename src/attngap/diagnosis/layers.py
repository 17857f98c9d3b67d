"""All that one layer's queries, keys and values tell: floors, ceilings, patterns, untrained and fitted errors."""

import dataclasses
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from attngap.diagnosis.bounds import bounds
from attngap.heads.inputs import LayerInputs
from attngap.heads.replacement import angles, build_replacement, output, relative_error, streams, window_only
from attngap.mechanisms.base import Mechanism
from attngap.mechanisms.catalogue import mechanism
from attngap.mechanisms.fit import QUICK, fit_layer
from attngap.models.plan import Replacement

PATTERN = 64  # an attention pattern is kept as a picture of this many squares a side
READS = 6  # far pairs of tokens kept for each head
SPECTRUM = 128  # singular values kept
UNTRAINED = ("elu", "relu", "favor", "hedgehog")
FIT = dataclasses.replace(QUICK, steps=20, check=20)  # a quarter of the steps go to repeated tokens


def examine(
    inputs: LayerInputs, exact: Float[Tensor, "h t dv"], ranks: Sequence[int], near: Replacement
) -> dict[str, Tensor]:
    """One layer on one sequence: certificates and a picture of the weights.

    Heads that are linear already have a picture only; zeros stand where their certificates would be.
    """
    weights = inputs.weights()
    out = {"pattern": pattern(weights), **reads(weights, near.window, near.sinks)}
    softmax = [head for head in range(inputs.heads) if head not in inputs.linear]
    if softmax and ranks:
        out |= _certificates(weights, inputs, softmax, ranks, near)
    return out


def untrained_errors(
    inputs: LayerInputs, exact: Float[Tensor, "h t dv"], near: Replacement
) -> dict[str, Float[Tensor, " h"]]:
    """Of mechanisms without training, to show what fitting is worth."""
    found = untrained(inputs, near)
    return {f"error.{name}": relative_error(output(each, inputs), exact) for name, each in found.items()}


def _certificates(
    weights: Tensor, inputs: LayerInputs, heads: list[int], ranks: Sequence[int], near: Replacement
) -> dict[str, Tensor]:
    values = inputs.v.repeat_interleave(inputs.group, 0)
    found = bounds(weights[heads], values[heads], ranks, window=near.window, sinks=near.sinks, causal=inputs.causal)

    def placed(part: Tensor) -> Tensor:
        whole = part.new_zeros(inputs.heads, *part.shape[1:])
        whole[heads] = part
        return whole

    return {
        "floor": placed(found.floor),
        "far": placed(found.far),
        "spectrum": placed(found.spectrum[:, :SPECTRUM]),
        "ceiling": placed(found.ceiling),
        "change": placed(found.change.to(torch.bfloat16)),
        "cuts": torch.tensor([found.cuts, found.possible]),
    }


def untrained(inputs: LayerInputs, options: Replacement) -> dict[str, Mechanism]:
    """Every mechanism that is tried without training; for causal heads sinks and window alone as well."""
    shape = {"heads": inputs.heads, "dim": inputs.dim, "value_dim": inputs.value_dim, "kv_heads": inputs.kv_heads}
    found = {name: mechanism(name, **shape, causal=inputs.causal).to(inputs.q.device) for name in UNTRAINED}
    if inputs.causal:
        found["window"] = window_only(inputs, options.window, options.sinks)
    return found


def pattern(weights: Float[Tensor, "h t s"]) -> Tensor:
    """The largest weight in each of PATTERN x PATTERN cells, as bytes on a square-root scale: faint lines show."""
    size = (min(PATTERN, weights.shape[1]), min(PATTERN, weights.shape[2]))
    small = torch.nn.functional.adaptive_max_pool2d(weights, size)
    return (small.clamp(0, 1).sqrt() * 255).round().to(torch.uint8)


def reads(weights: Float[Tensor, "h t s"], window: int, sinks: int) -> dict[str, Tensor]:
    """The strongest pairs (query, key) outside window and sinks, at most one per query."""
    query, key = (torch.arange(size, device=weights.device) for size in weights.shape[1:])
    near = ((query[:, None] - key).abs() < window) | (key < sinks)
    best, key = weights.masked_fill(near, 0.0).max(-1)  # (h, t)
    count = min(READS, weights.shape[1])
    weight, query = best.topk(count, -1)
    return {"read_weight": weight, "read_query": query, "read_key": key.gather(-1, query)}


def fit(batch: list[LayerInputs], exact: Float[Tensor, "b h t dv"], options: Replacement) -> Mechanism:
    """A replacement fitted to the layer's own outputs.

    The batch begins with repeated random tokens. Of several others the last is held out; a single one is trained on.
    """
    candidate, _ = build_replacement(batch[0], options, positions=batch[0].positions)
    q, k, v = streams(batch)
    with torch.enable_grad():
        fit_layer(
            candidate, q, k, v, exact, dataclasses.replace(FIT, heldout=int(len(batch) > 2)), rotary=angles(batch)
        )
    return candidate.requires_grad_(False)


def monotonicity(candidate: Mechanism, inputs: LayerInputs, rows: int = 16) -> Float[Tensor, " h"]:
    """Mean rank correlation, over some rows, of the replacement's far weights with the exact logits (2402.04347).

    One means that the feature map orders distant keys as softmax does, whatever their sizes.
    """
    q, k, v = streams([inputs])
    half = inputs.length // 2
    picked = torch.linspace(half, inputs.length - 1, min(rows, inputs.length - half)).long().to(q.device)
    far = max(2, half - getattr(candidate, "window", 0))
    with torch.no_grad():
        read = candidate.read(None, q, k, v, rotary=angles([inputs]))
    fq, fk = (read.q, read.k) if read.fq is None or read.fk is None else (read.fq, read.fk)
    scores, logits = (
        x[:, picked] @ y[:, :far].repeat_interleave(inputs.group, 0).mT
        for x, y in ((fq[0], fk[0]), (inputs.q, inputs.k))
    )
    return _spearman(scores, logits).mean(-1)


def _spearman(a: Tensor, b: Tensor) -> Tensor:
    ranks = [x.argsort(-1).argsort(-1).double() for x in (a, b)]
    centered = [x - x.mean(-1, keepdim=True) for x in ranks]
    return torch.nn.functional.cosine_similarity(*centered, dim=-1)
