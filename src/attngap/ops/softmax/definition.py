"""The definition of softmax attention, in the plainest code: all other forms equal it in values and gradients."""

import torch
from torch import Tensor

from attngap.ops.pairs import expand_heads, pair_mask


def softmax_weights(q: Tensor, k: Tensor, *, scale=None, causal=True, window=None, sinks=0, mask=None) -> Tensor:
    """(b, h, t, t): softmax of scale q.k over the keys a row may read; a row with none is zero."""
    k = expand_heads(k, q.shape[1])
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    allowed = pair_mask(q.shape[2], mask, causal=causal, window=window, sinks=sinks)[:, None]
    empty = ~allowed.any(-1, keepdim=True)
    logits = (q @ k.mT * scale).masked_fill(~allowed & ~empty, -torch.inf)
    return torch.softmax(logits, dim=-1).masked_fill(empty, 0.0)


def softmax_attention(q, k, v, *, scale=None, causal=True, window=None, sinks=0, mask=None) -> Tensor:
    weights = softmax_weights(q, k, scale=scale, causal=causal, window=window, sinks=sinks, mask=mask)
    return weights @ expand_heads(v, q.shape[1])
