"""Bidirectional linear attention: one state for the whole sequence, then one read a row; both in blocks of rows."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attngap.ops import pages
from attngap.ops.groups import ChunkView, Span
from attngap.ops.linear.chunks import Setting
from attngap.ops.normalizer import EPS, safe_normalizer


class LinearRows(torch.autograd.Function):
    """(q, k, v, mask, normalize, setting) -> out, S (b, heads, r, dv), z (b, heads, r) or None if unnormalized."""

    @staticmethod
    def forward(ctx, q, k, v, mask, normalize: bool, setting: Setting):
        n, r, dv = q.shape[0] * setting.heads, q.shape[3], v.shape[3]
        S = torch.zeros(n, r, dv, dtype=setting.dtype, device=q.device)
        z = torch.zeros(n, r, 1, dtype=setting.dtype, device=q.device) if normalize else None
        out = pages.empty((*q.shape[:3], dv), v.dtype, v.device)
        queries, keys, values, rows = (_folded(x, mask, setting) for x in (q, k, v, out))
        for block in _blocks(q, setting):
            key = keys.read(block)
            S.baddbmm_(key.mT, values.read(block))
            if z is not None:
                z.add_(key.sum(1)[..., None])
        for block in _blocks(q, setting):
            query = queries.read(block)
            rows.write(block, query @ S, None if z is None else safe_normalizer(query @ z).reciprocal_())
        ctx.save_for_backward(q, k, v, S, z, mask, out)
        ctx.setting = setting
        by_heads = S.unflatten(0, (-1, setting.heads))
        return out, by_heads, None if z is None else z.view(by_heads.shape[:3])

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out, dS, dz):
        q, k, v, S, z, mask, out = ctx.saved_tensors
        dq, dk, dv = (pages.empty_like(x) for x in (q, k, v))
        queries, keys, values, rows, d_rows = (_folded(x, mask, ctx.setting) for x in (q, k, v, out, d_out))
        to_q, to_k, to_v = (_folded(x, mask, ctx.setting) for x in (dq, dk, dv))
        dS, dz = dS.flatten(0, 1).clone(), None if z is None else dz.flatten(0, 1)[..., None].clone()
        for block in _blocks(q, ctx.setting):
            query, above = queries.read(block), d_rows.read(block)
            if z is None or dz is None:
                to_q.write(block, above @ S.mT)
            else:
                above, weight = _through_normalizer(query @ z, above, rows.read(block))
                to_q.write(block, (above @ S.mT).baddbmm_(weight, z.mT))
                dz.baddbmm_(query.mT, weight)
            dS.baddbmm_(query.mT, above)
        for block in _blocks(q, ctx.setting):
            from_values = values.read(block) @ dS.mT
            to_k.write(block, from_values if dz is None else from_values.add_(dz.mT))
            to_v.write(block, keys.read(block) @ dS)
        return dq, dk, dv, None, None, None


def _through_normalizer(normalizer: Tensor, above: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """From the gradient of the rows to those of their numerators and of their normalizers."""
    above = above / safe_normalizer(normalizer)
    weight = -(above * rows).sum(-1, keepdim=True)
    return above, weight.masked_fill_(normalizer.abs() < EPS, 0.0)  # a replaced normalizer is a constant


def _blocks(q: Tensor, setting: Setting) -> list[Span]:
    t = q.shape[2]
    return [Span(start, min(setting.chunk, t - start), 1) for start in range(0, t, setting.chunk)]


def _folded(x: Tensor, mask: Tensor | None, setting: Setting) -> ChunkView:
    return ChunkView(x, setting.heads, setting.dtype, mask)
