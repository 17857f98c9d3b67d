"""Fit every layer's replacement to the layer's own outputs, each on its own, while the model runs once."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from attngap.conversion.work import Work
from attngap.mechanisms.base import Mechanism
from attngap.mechanisms.fit import FitOptions, fit_layer
from attngap.models.capture import Call, capture


class _AllFitted(Exception):
    """Leaves the forward pass: later layers have nothing to fit."""


def fit_all(
    model: PreTrainedModel,
    mechanisms: dict[int, Mechanism],
    tokens: Int[Tensor, "count context"],
    options: FitOptions,
    work: Work,
    advance: Callable[..., None],
) -> Float[Tensor, "layers h"]:
    """Fit the mechanisms in place; the held-out error of each head. Finished layers are kept in `work`.

    All passages go through the model as one batch and each layer is fitted where it is met: one pass, and the queries,
    keys and values of one layer in memory.
    """
    errors: dict[int, Tensor] = {}
    for layer, mechanism in mechanisms.items():
        done = work.piece(f"layer-{layer}")
        if done is not None:
            errors[layer] = done.pop("error")
            mechanism.load_state_dict(done)
            advance()
    missing = set(mechanisms) - set(errors)

    def watch(call: Call) -> None:
        if call.cross or call.layer not in missing:
            return
        advance(0, note=f"layer {call.layer}")
        q, k, v, out = (x.float() for x in (call.q, call.k, call.v, call.output))
        mechanism = mechanisms[call.layer]
        with torch.enable_grad():
            errors[call.layer] = fit_layer(mechanism, q, k, v, out, options)
        work.keep(f"layer-{call.layer}", mechanism.state_dict() | {"error": errors[call.layer]})
        missing.remove(call.layer)
        advance()
        if not missing:
            raise _AllFitted

    if missing:
        body: Any = model.base_model  # without the head: logits of all passages would not fit
        cache = {} if getattr(model.config, "use_cache", None) is None else {"use_cache": False}
        with torch.no_grad(), capture(body, watch), contextlib.suppress(_AllFitted):
            body(input_ids=tokens, **cache)
    return torch.stack([errors[layer] for layer in mechanisms])
