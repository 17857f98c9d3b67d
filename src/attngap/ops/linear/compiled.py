"""Compiled linear attention as functions of tensors: where results go, and what stands in for what is not real."""

import torch
from torch import Tensor

from attngap.ops import native, pages
from attngap.ops.native.tensors import as_rows, decay_grad, lane_count, mask_rows, state_scratch, update_count


def forward(q, k, v, log_decay, S, z, mask) -> tuple[Tensor, Tensor, Tensor | None]:
    """out, S and z after the last token."""
    from attngap.ops.linear import kernels

    out = pages.empty((*q.shape[:3], v.shape[-1]), v.dtype, v.device)
    start, real = _z(S, z), mask_rows(q, mask)
    after_S, after_z = torch.empty_like(S), torch.empty_like(start)
    x = kernels.Inputs(*as_rows(q, k, v, S, start, real), normalize=z is not None)
    to = kernels.Results(*as_rows(out, after_S, after_z))
    scratch = state_scratch(kernels.Room, q, v)
    arguments = (x, *as_rows(log_decay), to, scratch.room)
    native.run(kernels.forward, arguments, q.dtype, lane_count(q), update_count(q, v), scratch)
    return out, after_S, None if z is None else after_z[..., 0]


def backward(q, k, v, log_decay, S, z, mask, out, d_out, dS, dz, wanted: bool) -> tuple[Tensor | None, ...]:
    """The gradients of q, k, v, log_decay (if it is wanted), S and z."""
    from attngap.ops.linear import kernels

    dq, dk, dv = (pages.empty_like(x) for x in (q, k, v))
    d_decay = decay_grad(log_decay, wanted)
    start, real, end = _z(S, z), mask_rows(q, mask), _z(S, dz)
    before_S, before_z = torch.empty_like(S), torch.empty_like(start)
    # A row of dk is written after its normalizer was read; where heads share keys it already holds another's gradient.
    norms = dk if q.shape[1] == k.shape[1] else q.new_empty((*q.shape[:3], 1))
    x = kernels.Inputs(*as_rows(q, k, v, S, start, real), normalize=z is not None)
    above = kernels.Above(*as_rows(out, d_out, dS, end))
    to = kernels.LinearGradRows(*as_rows(dq, dk, dv, d_decay, before_S, before_z, norms))
    scratch = state_scratch(kernels.Room, q, v)
    arguments = (x, *as_rows(log_decay), above, to, scratch.room)
    native.run(kernels.backward, arguments, q.dtype, lane_count(k), 4 * update_count(q, v), scratch)
    return dq, dk, dv, d_decay if wanted else None, before_S, None if z is None else before_z[..., 0]


def _z(S: Tensor, z: Tensor | None) -> Tensor:
    """(b, heads, r, 1)."""
    return S.new_zeros(()).expand(*S.shape[:3], 1) if z is None else z[..., None]
