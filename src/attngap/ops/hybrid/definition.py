"""The definition of hybrid attention, in the plainest code: all other forms equal it in values and gradients."""

import torch
from torch import Tensor

from attngap.ops.normalizer import safe_normalizer
from attngap.ops.pairs import expand_heads, pair_mask


def hybrid_weights(q, k, fq, fk, *, window, sinks=4, scale=None, log_gain=None, relative=False, mask=None) -> Tensor:
    """(b, h, t, t): exp(scale q.k) on near keys, exp(log_gain_i) fq_i.fk_j on the other past keys, rows summing to one.

    Near keys are the first `sinks` and the last `window` (the row itself included). With `relative` the far weights are
    measured against the row's largest near logit c_i: exp(c_i + log_gain_i) fq_i.fk_j. A row is measured in units of
    the larger of its largest near weight and its far mass: neither side overflows, and eps is relative to that unit.
    """
    b, h, t, d = q.shape
    k, fk = expand_heads(k, h), expand_heads(fk, h)
    scale = d**-0.5 if scale is None else scale
    near = pair_mask(t, mask, causal=True, window=window, sinks=sinks)[:, None]
    past = pair_mask(t, mask, causal=True, window=None, sinks=0)[:, None]
    logits = (q @ k.mT * scale).masked_fill(~near, -torch.inf)
    top = logits.amax(-1, keepdim=True)
    top = torch.where(top.isfinite(), top, 0.0)  # rows of padding have no near key
    gain = q.new_zeros(b, h, t, 1) if log_gain is None else _gain(log_gain, b, h, t)
    lift = gain + top if relative else gain
    far = (fq @ fk.mT).masked_fill(~(past & ~near), 0.0)
    unit = torch.maximum(top, lift + far.sum(-1, keepdim=True).abs().log()).detach()
    raw = (logits - unit).exp() + far * (lift - unit).clamp(max=700).exp()  # the clamp bites only where far is zero
    return raw / safe_normalizer(raw.sum(-1, keepdim=True))


def _gain(log_gain: Tensor, b: int, h: int, t: int) -> Tensor:
    return (log_gain[None, :, None] if log_gain.ndim == 1 else log_gain).expand(b, h, t)[..., None]


def hybrid_attention(q, k, v, fq, fk, **options) -> Tensor:
    return hybrid_weights(q, k, fq, fk, **options) @ expand_heads(v, q.shape[1])
