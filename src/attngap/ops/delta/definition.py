"""The definition of the delta rule, in the plainest code: all other forms equal it in values and gradients."""

import torch
from torch import Tensor

from attngap.ops.pairs import expand_heads


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
