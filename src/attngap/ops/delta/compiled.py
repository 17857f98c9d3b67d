"""The compiled delta rule as functions of tensors."""

import torch
from torch import Tensor

from attngap.ops import native, pages
from attngap.ops.native.tensors import as_rows, decay_grad, lane_count, mask_rows, state_scratch, update_count


def forward(q, k, v, beta, log_decay, S, mask, keep: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """out, S after the last token, and u (see `kernels`) if the backward is to have it."""
    from attngap.ops.delta import kernels

    out, after_S = pages.empty((*q.shape[:3], v.shape[-1]), v.dtype, v.device), torch.empty_like(S)
    u = pages.empty_like(out) if keep else None
    real = mask_rows(q, mask)
    x = kernels.Inputs(*as_rows(q, k, v, beta, S, real))
    to = kernels.Results(*as_rows(out, after_S))
    scratch = state_scratch(kernels.Room, q, v)
    arguments = (x, *as_rows(log_decay, u), to, scratch.room)
    native.run(kernels.forward, arguments, q.dtype, lane_count(q), 2 * update_count(q, v), scratch)
    return out, after_S, u


def backward(q, k, v, beta, log_decay, S, mask, u, d_out, dS, wanted: bool) -> tuple[Tensor | None, ...]:
    """The gradients of q, k, v, beta, log_decay (if it is wanted) and S; all must have the heads of q."""
    from attngap.ops.delta import kernels

    found = [pages.empty_like(x) for x in (q, k, v, beta)]
    results = *found, decay_grad(log_decay, wanted), torch.empty_like(S)
    real = mask_rows(q, mask)
    x = kernels.Inputs(*as_rows(q, k, v, beta, S, real))
    above, to = kernels.Results(*as_rows(d_out, dS)), kernels.DeltaGradRows(*as_rows(*results))
    scratch = state_scratch(kernels.Room, q, v)
    arguments = (x, *as_rows(log_decay, u), above, to, scratch.room)
    native.run(kernels.backward, arguments, q.dtype, lane_count(q), 6 * update_count(q, v), scratch)
    return *found, results[4] if wanted else None, results[5]
