"""The definitions: one token or one matrix at a time, in the plainest code; every fast form must equal these.

Layout `(b, h, t, d)`. k and v may have fewer heads than q (grouped queries): query head i reads key head
i // (h / h_kv). `mask` is `(b, t)`, True at real tokens: a False token is never attended to, leaves the state as it is,
and does not count as a position for windows and sinks. Outputs at False positions are zero.
"""

import torch
from torch import Tensor


def expand_heads(x: Tensor, heads: int) -> Tensor:
    """(b, h_kv, t, ...) -> (b, heads, t, ...), each key head repeated for its group of queries."""
    return x.repeat_interleave(heads // x.shape[1], dim=1)


def pair_mask(t: int, mask: Tensor | None, *, causal: bool, window: int | None, sinks: int) -> Tensor:
    """(b or 1, t, t) bool: may row i read key j? Window counts the row itself; sinks are the first real tokens."""
    index = torch.arange(t, device=None if mask is None else mask.device)
    real = torch.ones(1, t, dtype=torch.bool, device=index.device) if mask is None else mask.bool()
    place = real.long().cumsum(1) - 1  # (b, t) position among real tokens
    distance = place[:, :, None] - place[:, None, :]  # (b, t, t)
    allowed = real[:, None, :] & real[:, :, None]
    if causal:
        allowed = allowed & (index[:, None] >= index[None, :])
    if window is not None:
        near = distance.abs() < window if not causal else distance < window
        allowed = allowed & (near | (place[:, None, :] < sinks))
    return allowed


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


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, *, log_decay=None, normalize=True, causal=True, state=None, mask=None, eps=1e-6
) -> tuple[Tensor, dict[str, Tensor]]:
    """S_i = exp(g_i) S_{i-1} + k_i v_i^T, z_i likewise over k_i; o_i = q_i S_i / (q_i . z_i), or q_i S_i unnormalized.

    A normalizer n with |n| < eps is replaced by eps with its sign (sign of 0 is +): outputs stay finite, and zero where
    the numerator is zero. The state holds z only if normalized.
    """
    b, h, t, r = q.shape
    k, v = expand_heads(k, h), expand_heads(v, h)
    real = torch.ones(b, t, dtype=q.dtype, device=q.device) if mask is None else mask.to(q.dtype)
    S = q.new_zeros(b, h, r, v.shape[-1]) if state is None else expand_heads(state["S"], h)
    z = q.new_zeros(b, h, r) if state is None or not normalize else expand_heads(state["z"], h)
    if log_decay is None:
        log_decay = q.new_zeros(b, h, t)
    decay = expand_heads(log_decay, h)
    decay = decay[..., None] if decay.ndim == 3 else decay  # (b, h, t, 1 or r)
    if not causal:
        S = torch.einsum("bhtr,bhtv,bt->bhrv", k, v, real)
        z = torch.einsum("bhtr,bt->bhr", k, real)
    rows = []
    for i in range(t):
        if causal:
            here = real[:, None, i, None]  # (b, 1, 1)
            g = (decay[:, :, i] * here).exp()
            S = g[..., None] * S + (here * k[:, :, i])[..., None] * v[:, :, i, None, :]
            z = g * z + here * k[:, :, i]
        row = torch.einsum("bhr,bhrv->bhv", q[:, :, i], S)
        if normalize:
            row = row / safe_normalizer((q[:, :, i] * z).sum(-1, keepdim=True), eps)
        rows.append(row * real[:, None, i, None])
    return torch.stack(rows, 2), {"S": S, "z": z} if normalize else {"S": S}


def safe_normalizer(n: Tensor, eps: float) -> Tensor:
    return torch.where(n.abs() < eps, torch.where(n < 0, -eps, torch.full_like(n, eps)), n)


def delta_attention(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, *, log_decay=None, state=None, mask=None
) -> tuple[Tensor, dict[str, Tensor]]:
    """S_i = D_i S_{i-1} + beta_i k_i (v_i - k_i^T D_i S_{i-1})^T with D_i = diag(exp g_i); o_i = q_i^T S_i."""
    b, h, t, r = q.shape
    k, v, beta = expand_heads(k, h), expand_heads(v, h), expand_heads(beta, h)
    real = torch.ones(b, t, dtype=q.dtype, device=q.device) if mask is None else mask.to(q.dtype)
    S = q.new_zeros(b, h, r, v.shape[-1]) if state is None else expand_heads(state["S"], h)
    decay = q.new_zeros(b, h, t, 1) if log_decay is None else expand_heads(log_decay, h)
    decay = decay[..., None] if decay.ndim == 3 else decay
    rows = []
    for i in range(t):
        here = real[:, None, i, None]
        S = (decay[:, :, i] * here).exp()[..., None] * S
        old = torch.einsum("bhr,bhrv->bhv", k[:, :, i], S)
        write = here * beta[:, :, i, None] * (v[:, :, i] - old)
        S = S + k[:, :, i, :, None] * write[:, :, None, :]
        rows.append(torch.einsum("bhr,bhrv->bhv", q[:, :, i], S) * here)
    return torch.stack(rows, 2), {"S": S}


def hybrid_weights(
    q, k, fq, fk, *, window, sinks=4, scale=None, log_gain=None, relative=False, mask=None, eps=1e-6
) -> Tensor:
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
    return raw / safe_normalizer(raw.sum(-1, keepdim=True), eps)


def _gain(log_gain: Tensor, b: int, h: int, t: int) -> Tensor:
    return (log_gain[None, :, None] if log_gain.ndim == 1 else log_gain).expand(b, h, t)[..., None]


def hybrid_attention(q, k, v, fq, fk, **options) -> Tensor:
    return hybrid_weights(q, k, fq, fk, **options) @ expand_heads(v, q.shape[1])
