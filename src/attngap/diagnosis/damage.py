"""Damage of replacing one head, estimated for every head at once from a few backward passes (docs/theory.md 5.1)."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from attngap.models.capture import Call, capture
from attngap.models.fisher import draw, frozen

MOST = 3.0  # nats a token and draw
Change = Callable[[Call], Tensor]  # (..., h, t, dv): what replacements would add to the output of the call


def projections(
    model: PreTrainedModel, tokens: Int[Tensor, "1 t"], change: Change, *, draws: int, seed: int
) -> list[Float[Tensor, "draws ... h t"]]:
    """g_h . Delta o_h of every layer, head and token, for `draws` independent draws of labels.

    g is the gradient of the log-probability of labels drawn from the model itself, so E[g g^T] is the Fisher matrix and
    E[(g . Delta o)^2] / 2 the KL divergence to second order. An output without logits (an encoder's) is probed in
    random directions of its mean-pooled, normalized embedding instead: then E[(g . Delta o)^2] is its squared change.
    """
    changes: list[Tensor] = []
    leaves: list[Tensor] = []

    def watch(call: Call) -> Tensor | None:
        if call.cross:
            return None
        changes.append(change(call).detach())
        leaf = torch.zeros_like(call.output, requires_grad=True)
        leaves.append(leaf)
        return call.output + leaf

    generator = torch.Generator().manual_seed(seed)
    out: list[list[Tensor]] = []
    with frozen(model), torch.enable_grad(), capture(model, watch):
        result = run(model, tokens)
        for target, direction in probes(result, draws, generator):
            grads = torch.autograd.grad(target, leaves, direction, retain_graph=True)
            out.append([(g[0] * c).sum(-1) for g, c in zip(grads, changes, strict=True)])
    return [torch.stack(layer) for layer in zip(*out, strict=True)]


def probes(result: Any, draws: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """What to differentiate, and random cotangents whose covariance is the metric of damage there."""
    logits = getattr(result, "logits", None)
    if logits is None:
        pooled = embedding(result)
        for _ in range(draws):
            yield pooled, torch.randn(pooled.shape, generator=generator)
        return
    cotangent = logits.detach().softmax(-1)  # p; minus it plus one at the label is the gradient of log p(label)
    labels = draw(cotangent, draws, generator)
    cotangent.neg_()
    for label in labels.split(1, -1):
        yield logits, cotangent.scatter_add_(-1, label, torch.ones_like(label, dtype=cotangent.dtype))
        cotangent.scatter_add_(-1, label, -torch.ones_like(label, dtype=cotangent.dtype))


def embedding(result: Any) -> Float[Tensor, "b d"]:
    """Mean over tokens, normalized: what sentence encoders compare."""
    return nn.functional.normalize(result.last_hidden_state.mean(1), dim=-1)


def run(model: PreTrainedModel, tokens: Int[Tensor, "b t"]) -> Any:
    """One forward pass; a decoder that reads an encoder gets the same tokens on both sides."""
    extra = {"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {}
    cache = {} if getattr(model.config, "use_cache", None) is None else {"use_cache": False}
    return model(input_ids=tokens, **extra, **cache)


def score(projected: Float[Tensor, "draws *what h t"], *, labels: bool) -> Float[Tensor, "*what h"]:
    """Estimated damage: with labels the KL divergence in nats a token, else the squared change of the embedding.

    On few tokens the change of a head is far beyond second order; a square of many nats there is no estimate any more,
    so a token counts for at most MOST.
    """
    if labels:
        return (projected.square() / 2).clamp(max=MOST).mean(-1).mean(0)
    return projected.sum(-1).square().mean(0)
