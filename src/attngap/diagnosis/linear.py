"""Heads that a conversion has made linear already: what they read is their mechanism's weights, not a softmax."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from attngap.heads.inputs import FORBIDDEN, LayerInputs
from attngap.models.capture import CONVERTED, Call


def with_mixing(inputs: LayerInputs, call: Call, row: int = 0) -> LayerInputs:
    """Row `row` of the call, in which the logits of linear heads are logarithms of the weights they really have.

    Weights of mechanisms without a normalizer may be negative: then shares are of absolute weight.
    """
    if not call.linear:
        return inputs
    replaced: Any = call.module.get_submodule(CONVERTED)
    streams = (x[row : row + 1] for x in (call.q, call.k, call.v))
    turned = None if call.rotary is None else tuple(x[min(row, len(x) - 1)][None] for x in call.rotary)
    with torch.no_grad():
        weights: Tensor = replaced.mechanism.weights(replaced.mechanism.read(None, *streams, rotary=turned))
    share = weights[0, list(call.linear)].float().abs()
    share = share / share.sum(-1, keepdim=True).clamp(min=torch.finfo(share.dtype).tiny)
    return dataclasses.replace(inputs, mixing=share.log().clamp(min=FORBIDDEN))
