"""The near part of hybrid attention, block by block, under one normalizer with a far part that was computed elsewhere.

In the words of `blocks`: a block's rows are (P V + c far) / n, and n is the sum of P plus c mass.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attngap.ops.exponent import weight_exp_
from attngap.ops.hybrid.blocks import BlockGrads, Piece, backward_near, combine, make_timelines, split
from attngap.ops.hybrid.layout import put_rows
from attngap.ops.normalizer import safe_normalizer


def merged_rows(piece: Piece, far: Tensor, mass: Tensor, out: Tensor, stats: list[Tensor]) -> None:
    """Fill `out` and the statistics m, n, c of all rows."""
    for block in piece.layout.blocks():
        P = piece.logits(block, piece.keys.read(block.start, block.stop, piece.dtype, sinks=True))
        V = piece.values.read(block.start, block.stop, piece.dtype, sinks=True)
        top, lift, far_mass = P.amax(-1, keepdim=True), piece.scalars(piece.gain, block), piece.scalars(mass, block)
        m, c = combine(top, lift + top if piece.relative else lift, far_mass)
        weight_exp_(P.sub_(m)).mul_(piece.masks.visible(block))
        n = P.sum(-1, keepdim=True).addcmul_(far_mass, c)
        put_rows(out, block, torch.bmm(P, V).addcmul_(piece.rows(far, block), c).div_(safe_normalizer(n)))
        for store, value in zip(stats, (m, n, c), strict=True):
            put_rows(store, block, value)


def backward_merged(piece: Piece, grads: BlockGrads, far: Tensor, mass: Tensor, d_far, d_mass) -> None:
    for block in piece.layout.blocks():
        g, D, c = grads.rows(piece, block)
        put_rows(d_far, block, g * c)
        put_rows(d_mass, block, -D * c)
        d_lift = (g * piece.rows(far, block)).sum(-1, keepdim=True).sub_(D * piece.scalars(mass, block)).mul_(c)
        put_rows(grads.dgain, block, d_lift)
        if grads.near_wanted:
            V = piece.values.read(block.start, block.stop, piece.dtype, sinks=True)
            backward_near(piece, grads, block, V, g, D, None, d_lift)


class HybridMerged(torch.autograd.Function):
    """(q, k, v, log_gain, past k, v, far, mass) -> out for a piece whose layout all sequences share."""

    @staticmethod
    def forward(ctx, q, k, v, gain, past_k, past_v, far, mass, layout, scale, relative):
        b, h, t, _ = q.shape
        out = q.new_empty(b, h, t, v.shape[3])
        stats = [q.new_empty(b, h, t, dtype=gain.dtype) for _ in range(3)]
        near = q, k, v, gain, past_k, past_v
        for part, piece in _split(layout, scale, relative, near):
            merged_rows(piece, far[part], mass[part], out[part], [x[part] for x in stats])
        ctx.save_for_backward(*near, far, mass, out, *stats)
        ctx.options = layout, scale, relative
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads_above):
        *sources, out, unit, norm, coefficient = ctx.saved_tensors
        layout, scale, relative = ctx.options
        near, (far, mass) = sources[:6], sources[6:]
        found = [
            torch.zeros(x.shape, dtype=unit.dtype, device=x.device) if wanted else None
            for x, wanted in zip(sources, ctx.needs_input_grad[:8], strict=True)
        ]
        rows_given = {"d_out": grads_above[0], "out": out, "unit": unit, "norm": norm, "coefficient": coefficient}
        for part, piece in _split(layout, scale, relative, near):
            dq, dk, dv, dgain, dpast_k, dpast_v, d_far, d_mass = (None if x is None else x[part] for x in found)
            timelines = make_timelines(layout, (dpast_k, dpast_v, None), (dk, dv, None))
            given = {name: x[part] for name, x in rows_given.items()}
            grads = BlockGrads(
                **given,
                **dict(zip(("keys", "values", "features"), timelines, strict=True)),
                dq=dq,
                dfq=None,
                dgain=dgain,
            )
            backward_merged(piece, grads, far[part], mass[part], d_far, d_mass)
        down = (None if g is None else g.to(x.dtype) for g, x in zip(found, sources, strict=True))
        return (*down, None, None, None)


def _split(layout, scale, relative, near):
    q, k, v, gain, past_k, past_v = near
    return split(layout, scale, relative, (q, k, v, q, k, gain, past_k, past_v, past_k), None)  # no features are read
