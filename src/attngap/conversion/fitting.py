"""Fit every layer's replacement to the layer's own outputs, each on its own, from captured queries, keys and values."""

from collections.abc import Callable, Iterable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from attngap.conversion.work import Work
from attngap.mechanisms.base import Mechanism
from attngap.mechanisms.fit import FitOptions, fit_layer
from attngap.models.capture import Call, capture

MEMORY = 2 * 2**30  # bytes of captured tensors held at once; more layers than fit are captured in another sweep

Captured = tuple[
    Float[Tensor, "b h t d"], Float[Tensor, "b h_kv t d"], Float[Tensor, "b h_kv t dv"], Float[Tensor, "b h t dv"]
]


def fit_all(
    model: PreTrainedModel,
    mechanisms: dict[int, Mechanism],
    tokens: Int[Tensor, "count context"],
    options: FitOptions,
    work: Work,
    advance: Callable[..., None],
) -> Float[Tensor, "layers h"]:
    """Fit the mechanisms in place; the held-out error of each head. Finished layers are kept in `work`."""
    errors: dict[int, Tensor] = {}
    missing = []
    for layer, mechanism in mechanisms.items():
        done = work.piece(f"layer-{layer}")
        if done is None:
            missing.append(layer)
            continue
        errors[layer] = done.pop("error")
        mechanism.load_state_dict(done)
        advance()
    while missing:
        batch = missing[: _room(mechanisms[missing[0]], tokens)]
        missing = missing[len(batch) :]
        advance(0, note="capturing")
        for layer, streams in capture_layers(model, tokens, batch).items():
            advance(0, note=f"layer {layer}")
            errors[layer] = fit_layer(mechanisms[layer], *streams, options)
            work.keep(f"layer-{layer}", mechanisms[layer].state_dict() | {"error": errors[layer]})
            advance()
    return torch.stack([errors[layer] for layer in mechanisms])


def _room(mechanism: Mechanism, tokens: Tensor) -> int:
    """How many layers of this shape fit into MEMORY."""
    m = mechanism
    floats = (m.heads + m.kv_heads) * (m.dim + m.value_dim) * tokens.numel()
    return max(1, int(MEMORY // (4 * floats)))


@torch.no_grad()
def capture_layers(
    model: PreTrainedModel, tokens: Int[Tensor, "count context"], layers: Iterable[int]
) -> dict[int, Captured]:
    """q, k, v and output of these layers on every passage."""
    wanted = set(layers)
    found: dict[int, list[tuple[Tensor, ...]]] = {layer: [] for layer in sorted(wanted)}

    def note(call: Call) -> None:
        if not call.cross and call.layer in wanted:
            found[call.layer].append(tuple(x.detach().float().clone() for x in (call.q, call.k, call.v, call.output)))

    with capture(model, note):
        for passage in tokens:
            model(input_ids=passage[None])
    return {layer: _stack(found.pop(layer)) for layer in sorted(wanted)}


def _stack(parts: list[tuple[Tensor, ...]]) -> Captured:
    q, k, v, out = (torch.cat(each) for each in zip(*parts, strict=True))
    return q, k, v, out
