"""What would stand in for a layer's heads, and how far its output would be off."""

from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor

from attngap.diagnosis.sequences import Sequence
from attngap.mechanisms.base import Mechanism
from attngap.mechanisms.catalogue import mechanism
from attngap.models.plan import Replacement

UNTRAINED = ("elu", "relu", "favor", "hedgehog")
WINDOW_ONLY = "window"  # sinks and window exact, the rest dropped


BIAS = "stays: its logits carry a learned position bias, which no replacement here reproduces"
SLIDING = "stays: it has a sliding window already, so its cost is bounded"
LINEAR = "is linear already: an earlier conversion replaced it"
BARRIERS = (BIAS, SLIDING, LINEAR)


def barrier(sequence: Sequence) -> str | None:
    """Why a layer's heads cannot be replaced, or None."""
    if sequence.bias is not None:
        return BIAS
    if sequence.allowed is not None:
        return SLIDING
    return LINEAR if len(sequence.linear) == sequence.heads else None


def new_replacement(sequence: Sequence, options: Replacement) -> Mechanism:
    """Causal: sinks and window exact, features for the rest. Bidirectional: features for everything."""
    shape = _shape(sequence)
    if not sequence.causal:
        return mechanism(options.feature_map, **shape, **options.map_options(), causal=False)
    return mechanism("hybrid", **shape, **options.options())


def untrained(sequence: Sequence, options: Replacement) -> dict[str, Mechanism]:
    """Mechanisms without training, to show what fitting is worth; and for causal heads sinks and window alone."""
    shape = _shape(sequence)
    found = {name: mechanism(name, **shape, causal=sequence.causal) for name in UNTRAINED}
    if sequence.causal:
        near = {"window": options.window, "sinks": options.sinks}
        found[WINDOW_ONLY] = mechanism("hybrid", **shape, **near, feature_map="none", gain="none")
    return found


def output(replacement: Mechanism, sequence: Sequence) -> Float[Tensor, "h t dv"]:
    """The replacement's output on one sequence."""
    q, k, v = streams([sequence])
    with torch.no_grad():
        return replacement(None, q, k, v)[1][0]


def streams(batch: Iterable[Sequence]) -> tuple[Tensor, Tensor, Tensor]:
    """Sequences of one length as (b, h, t, d). Mechanisms divide logits by sqrt(d); the model's own scale is in q."""
    batch = list(batch)
    width = batch[0].q.shape[-1] ** 0.5
    return (
        torch.stack([s.q for s in batch]) * width,
        torch.stack([s.k for s in batch]),
        torch.stack([s.v for s in batch]),
    )


def relative_error(found: Float[Tensor, "h t dv"], exact: Float[Tensor, "h t dv"]) -> Float[Tensor, " h"]:
    """||found - exact||^2 / ||exact||^2 of each head."""
    return (found - exact).square().sum((-2, -1)) / exact.square().sum((-2, -1)).clamp(min=1e-30)


def _shape(sequence: Sequence) -> dict[str, int]:
    heads, kv_heads = sequence.heads, sequence.k.shape[0]
    return {"heads": heads, "dim": sequence.q.shape[-1], "value_dim": sequence.v.shape[-1], "kv_heads": kv_heads}
