"""The definition of linear attention, in the plainest code: all other forms equal it in values and gradients."""

import torch
from torch import Tensor

from attngap.ops.normalizer import safe_normalizer
from attngap.ops.pairs import expand_heads


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, *, log_decay=None, normalize=True, causal=True, state=None, mask=None
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
            row = row / safe_normalizer((q[:, :, i] * z).sum(-1, keepdim=True))
        rows.append(row * real[:, None, i, None])
    return torch.stack(rows, 2), {"S": S, "z": z} if normalize else {"S": S}
