"""Bidirectional linear attention: one state for the whole sequence, then one read a row."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attngap.ops.linear_chunks import EPS, Carried, Run, Setting, safe


class LinearRows(torch.autograd.Function):
    """(q, k, v, S, z or None if not normalized, mask, setting) -> out, S, z; S and z come in as zeros."""

    @staticmethod
    def forward(ctx, q, k, v, S, z, mask, setting: Setting):
        run = Run(q, k, v, None, mask, setting)
        state = Carried(S, z)
        for i in range(len(run.sizes)):
            state.advance(run.decay, run.k[i], run.v[i])
        out = torch.empty(*q.shape[:3], v.shape[-1], dtype=v.dtype, device=v.device)
        rows = run.chunked(out)
        for i in range(len(run.sizes)):
            top = torch.bmm(run.q[i], state.S, out=rows.target(i, run.scratch, "rows"))
            if state.z is not None:
                top.div_(safe(torch.bmm(run.q[i], state.z)))
            rows.write(i, top)
        ctx.save_for_backward(q, k, v, state.S, state.z, mask, out)
        ctx.setting = setting
        return out, *state.by_heads(setting.heads)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out, dS, dz):
        q, k, v, S, z, mask, out = ctx.saved_tensors
        run = Run(q, k, v, None, mask, ctx.setting)
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        R = Carried(dS, None if z is None else dz)
        d_rows, rows, place = run.chunked(d_out), run.chunked(out), run.chunked(dq)
        for i in range(len(run.sizes)):
            place.write(i, _query_grad(run.q[i], d_rows[i], rows[i], S, z, R))
        dk_rows, dv_rows = run.chunked(dk), run.chunked(dv)
        for i in range(len(run.sizes)):
            from_values = run.v[i] @ R.S.mT
            dk_rows.write(i, from_values if R.z is None else from_values.add_(R.z.mT))
            dv_rows.write(i, run.k[i] @ R.S)
        return dq, dk, dv, None, None, None, None


def _query_grad(q: Tensor, above: Tensor, rows: Tensor, S: Tensor, z: Tensor | None, R: Carried) -> Tensor:
    """dq of one chunk; what it asks of the state is added to R."""
    if z is None or R.z is None:
        R.S.baddbmm_(q.mT, above)
        return above @ S.mT
    normalizer = q @ z
    above = above / safe(normalizer)
    weight = -(above * rows).sum(-1, keepdim=True)
    weight = weight.masked_fill(normalizer.abs() < EPS, 0.0)  # a replaced normalizer is a constant
    R.S.baddbmm_(q.mT, above)
    R.z.baddbmm_(q.mT, weight)
    return (above @ S.mT).baddbmm_(weight, z.mT)
