"""Hybrid attention over a piece of a sequence, block by block, with a hand-written backward.

With P the near weights exp(l - m), T the staircase of far products fq.fk in the band, S and z the sums over the tokens
before it and c = exp(log_gain - m), a block's rows are (P V + c (T V + fq S)) / n, n the same sum without values.
Backward goes twice over the blocks: forward in time with S for everything in the band, then backward in time with the
gradient of S. Kept for it, beyond inputs and outputs, are three numbers a row.
"""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attngap.ops.exponent import MASSLESS, NORMAL, SMALLEST, weight_exp_
from attngap.ops.hybrid.layout import Block, Layout, Masks, Timeline, put_rows, row_scalars, rows
from attngap.ops.normalizer import EPS, safe_normalizer

CACHE = 2**18  # weights of one block computed at a time: a MiB, so that what works on them stays in cache


class Near(NamedTuple):
    """The near part of every row, for when it is used many times: see `near_attention`."""

    out: Tensor  # (b, h, t, dv) softmax over the near keys alone
    top: Tensor  # (b, h, t) largest near logit
    log_mass: Tensor  # (b, h, t) log of the sum of exp of near logits


def combine(top: Tensor, lift: Tensor, mass: Tensor) -> tuple[Tensor, Tensor]:
    """The log-unit m a row is measured in, and exp(lift - m), the weight of its features in that unit.

    m is the larger of the largest near logit and the log of the far mass: neither side overflows and, for positive
    features, the normalizer is at least one. Where there is no far mass the features count for nothing, and their
    coefficient is only kept finite. One so small that its products would leave the normal numbers, where processors are
    slow, is zero: so are all from a query's `reach` on.
    """
    least, most = NORMAL[mass.dtype]
    unit = torch.maximum(top, mass.abs().log_().add_(lift))
    exponent = torch.where(mass == 0, (lift - unit).clamp_(max=MASSLESS), lift - unit)
    weight = exponent.clamp_(least, most).exp_()
    return unit, weight.mul_(weight > SMALLEST[mass.dtype])


@dataclasses.dataclass(frozen=True)
class Piece:
    """A few sequences of a piece, as views: all their blocks are done before the next few."""

    layout: Layout
    masks: Masks
    scale: float
    relative: bool
    kv_heads: int
    dtype: torch.dtype  # sums are kept in it
    q: Tensor
    fq: Tensor
    gain: Tensor
    keys: Timeline
    values: Timeline
    features: Timeline
    near: Near | None

    def rows(self, x: Tensor, block: Block) -> Tensor:
        return rows(x, block, self.kv_heads, self.dtype)

    def scalars(self, x: Tensor, block: Block) -> Tensor:
        return row_scalars(x, block, self.kv_heads)

    def leaving_columns(self, block: Block) -> slice:
        """The columns of a band, sinks included, that are far for all rows of the next block."""
        return slice(self.layout.sinks, self.layout.sinks + block.leaving)

    def logits(self, block: Block, K: Tensor) -> Tensor:
        return torch.baddbmm(self.masks.near(block), self.rows(self.q, block), K.mT, alpha=self.scale)

    def far_scores(self, block: Block, Q: Tensor, F: Tensor) -> Tensor:
        return torch.bmm(Q, F.mT).mul_(self.masks.far(block))


def split(layout: Layout, scale: float, relative: bool, sources, near: Near | None) -> Iterator[tuple[slice, Piece]]:
    """Cut the batch so that a block's weights stay in cache."""
    q, k, v, fq, fk, gain, past_k, past_v, past_fk = sources
    b, h, _, _ = q.shape
    block = min(layout.chunk, layout.length)
    size = max(1, CACHE // (h * block * (layout.sinks + layout.window + block)))
    masks = Masks(layout, h // k.shape[1], gain)
    for first in range(0, b, size):
        part = slice(first, min(first + size, b))
        cut = [x[part] for x in (past_k, past_v, past_fk, k, v, fk)]
        timelines = make_timelines(layout, cut[:3], cut[3:])
        close = None if near is None else Near(*(x[part] for x in near))
        yield (
            part,
            Piece(
                layout, masks, scale, relative, k.shape[1], gain.dtype, q[part], fq[part], gain[part], *timelines, close
            ),
        )


def make_timelines(layout: Layout, past, new) -> tuple[Timeline, Timeline, Timeline]:
    skips = (layout.old_sinks, layout.old_sinks, 0)  # the features of sinks are never read, so they are not kept
    keys, values, features = (Timeline(layout, x, y, skip=skip) for x, y, skip in zip(past, new, skips, strict=True))
    return keys, values, features


def forward_rows(piece: Piece, S: Tensor, z: Tensor, out: Tensor, stats: list[Tensor]) -> None:
    """Fill `out` and, if wanted, the statistics m, n, c of all rows; S and z go from before the piece to after it."""
    for block in piece.layout.blocks():
        V = piece.values.read(block.start, block.stop, piece.dtype, sinks=True)
        Q = piece.rows(piece.fq, block)
        mass = torch.bmm(Q, z)
        T = F = None
        if block.leaving:
            F = piece.features.read(block.start, block.end, piece.dtype)
            T = piece.far_scores(block, Q, F)
            mass += T.sum(-1, keepdim=True)
        lift = piece.scalars(piece.gain, block)
        if piece.near is None:
            P = piece.logits(block, piece.keys.read(block.start, block.stop, piece.dtype, sinks=True))
            top = P.amax(-1, keepdim=True)
            m, c = combine(top, lift + top if piece.relative else lift, mass)
            weight_exp_(P.sub_(m)).mul_(piece.masks.visible(block))
            n = P.sum(-1, keepdim=True).addcmul_(mass, c)
            if T is not None:
                P[..., piece.leaving_columns(block)].addcmul_(T, c)
            rows_out = torch.bmm(P, V)
        else:
            top = piece.scalars(piece.near.top, block)
            m, c = combine(top, lift + top if piece.relative else lift, mass)
            share = (piece.scalars(piece.near.log_mass, block) - m).clamp_(*NORMAL[m.dtype]).exp_()
            n = torch.addcmul(share, mass, c)
            rows_out = piece.rows(piece.near.out, block) * share
            if T is not None:
                rows_out.baddbmm_(T.mul_(c), V[:, piece.leaving_columns(block)])
        put_rows(out, block, rows_out.baddbmm_(Q.mul(c), S).div_(safe_normalizer(n)))
        for store, value in zip(stats, (m, n, c), strict=False):
            put_rows(store, block, value)
        if F is not None:
            S.baddbmm_(F.mT, V[:, piece.leaving_columns(block)])
            z += F.sum(1)[..., None]


@dataclasses.dataclass(frozen=True)
class BlockGrads:
    """Where a piece's gradients go, None where nobody asked, and what they come from."""

    d_out: Tensor
    out: Tensor
    unit: Tensor
    norm: Tensor
    coefficient: Tensor
    dq: Tensor | None
    dfq: Tensor | None
    dgain: Tensor | None
    keys: Timeline
    values: Timeline
    features: Timeline

    @property
    def near_wanted(self) -> bool:
        return self.dq is not None or self.keys.wanted or self.values.wanted

    def rows(self, piece: Piece, block: Block) -> tuple[Tensor, Tensor, Tensor]:
        """g, D, c: the gradient of a row's weight on token j, in the unit of the row, is g.v_j - D."""
        n = piece.scalars(self.norm, block)
        g = piece.rows(self.d_out, block) / safe_normalizer(n)
        D = (g * piece.rows(self.out, block)).sum(-1, keepdim=True)
        return g, D.masked_fill_(n.abs() < EPS, 0.0), piece.scalars(self.coefficient, block)


def backward_band(piece: Piece, grads: BlockGrads, S: Tensor, z: Tensor) -> None:
    """Forward in time, S and z growing: every gradient but those that reach a token through S and z."""
    for block in piece.layout.blocks():
        V = piece.values.read(block.start, block.stop, piece.dtype, sinks=True)
        g, D, c = grads.rows(piece, block)
        Q = piece.rows(piece.fq, block)
        dQ = torch.bmm(g, S.mT).baddbmm_(D, z.mT, alpha=-1)
        F = None
        if block.leaving:
            F = piece.features.read(block.start, block.end, piece.dtype)
            dT = torch.bmm(g, V[:, piece.leaving_columns(block)].mT).sub_(D).mul_(piece.masks.far(block))
            dQ.baddbmm_(dT, F)
            if grads.features.wanted:
                grads.features.add(torch.bmm(dT.mul_(c).mT, Q), block.start, block.end)
        dQ *= c
        put_rows(grads.dfq, block, dQ)
        d_lift = None
        if grads.dgain is not None or (piece.relative and grads.near_wanted):
            d_lift = (dQ * Q).sum(-1, keepdim=True)
            put_rows(grads.dgain, block, d_lift)
        if grads.near_wanted:
            T = None if F is None else piece.far_scores(block, Q, F).mul_(c)
            backward_near(piece, grads, block, V, g, D, T, d_lift)
        if F is not None:
            S.baddbmm_(F.mT, V[:, piece.leaving_columns(block)])
            z += F.sum(1)[..., None]


def backward_near(piece: Piece, grads: BlockGrads, block: Block, V, g, D, T, d_lift) -> None:
    """The gradients of q, k and, through the weights of the band, v."""
    K = piece.keys.read(block.start, block.stop, piece.dtype, sinks=True)
    P = piece.logits(block, K)
    ties = (P.amax(-1, keepdim=True) == P).to(P) if piece.relative else None
    weight_exp_(P.sub_(piece.scalars(grads.unit, block))).mul_(piece.masks.visible(block))
    if grads.dq is not None or grads.keys.wanted:
        dP = torch.bmm(g, V.mT).sub_(D).mul_(P)
        if ties is not None:  # the largest near logit also measures the features; equal ones share
            dP.addcmul_(ties, d_lift / ties.sum(-1, keepdim=True))
        dP *= piece.scale
        if grads.dq is not None:
            put_rows(grads.dq, block, torch.bmm(dP, K))
        if grads.keys.wanted:
            grads.keys.add(torch.bmm(dP.mT, piece.rows(piece.q, block)), block.start, block.stop, sinks=True)
    if grads.values.wanted:
        if T is not None:
            P[..., piece.leaving_columns(block)] += T
        grads.values.add(torch.bmm(P.mT, g), block.start, block.stop, sinks=True)


def backward_state(piece: Piece, grads: BlockGrads, dS: Tensor, dz: Tensor) -> None:
    """Backward in time, dS and dz growing: what reaches a token through S and z."""
    for block in reversed(piece.layout.blocks()):
        if block.leaving and grads.features.wanted:
            V = piece.values.read(block.start, block.end, piece.dtype)
            grads.features.add(torch.baddbmm(dz.mT, V, dS.mT), block.start, block.end)
        if block.leaving and grads.values.wanted:
            F = piece.features.read(block.start, block.end, piece.dtype)
            grads.values.add(torch.bmm(F, dS), block.start, block.end)
        g, D, c = grads.rows(piece, block)
        Q = piece.rows(piece.fq, block) * c
        dS.baddbmm_(Q.mT, g)
        dz.baddbmm_(Q.mT, D, alpha=-1)


class HybridBlocks(torch.autograd.Function):
    """(q, k, v, fq, fk, log_gain, past k, v, fk, S, z) -> (out, S, z) for a piece whose layout all sequences share."""

    @staticmethod
    def forward(ctx, q, k, v, fq, fk, gain, past_k, past_v, past_fk, S, z, layout, scale, relative, near):
        b, h, t, _ = q.shape
        sources = q, k, v, fq, fk, gain, past_k, past_v, past_fk
        out = q.new_empty(b, h, t, v.shape[3])
        kept = 3 if any(ctx.needs_input_grad) else 0
        stats = [q.new_empty(b, h, t, dtype=S.dtype) for _ in range(kept)]
        after = S.clone(memory_format=torch.contiguous_format), z[..., None].clone()
        for part, piece in split(layout, scale, relative, sources, near):
            S_part, z_part = (x[part].flatten(0, 1) for x in after)
            forward_rows(piece, S_part, z_part, out[part], [x[part] for x in stats])
        ctx.save_for_backward(*sources, S, z, out, *stats)
        ctx.options = layout, scale, relative
        ctx.set_materialize_grads(False)
        return out, after[0], after[1][..., 0]

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out, dS, dz):
        *sources, S, z, out, unit, norm, coefficient = ctx.saved_tensors
        layout, scale, relative = ctx.options
        found = [
            torch.zeros(x.shape, dtype=S.dtype, device=x.device) if wanted else None
            for x, wanted in zip(sources, ctx.needs_input_grad[:9], strict=True)
        ]
        d_out = torch.zeros_like(out) if d_out is None else d_out
        rows_given = {"d_out": d_out, "out": out, "unit": unit, "norm": norm, "coefficient": coefficient}
        dS = torch.zeros_like(S) if dS is None else dS.clone(memory_format=torch.contiguous_format)
        dz = torch.zeros_like(z)[..., None] if dz is None else dz[..., None].clone()
        for part, piece in split(layout, scale, relative, sources, None):
            dq, dk, dv, dfq, dfk, dgain, *past = (None if x is None else x[part] for x in found)
            given = {name: x[part] for name, x in rows_given.items()}
            keys, values, features = make_timelines(layout, past, (dk, dv, dfk))
            grads = BlockGrads(**given, dq=dq, dfq=dfq, dgain=dgain, keys=keys, values=values, features=features)
            backward_band(piece, grads, S[part].flatten(0, 1).clone(), z[part].flatten(0, 1)[..., None].clone())
            backward_state(piece, grads, dS[part].flatten(0, 1), dz[part].flatten(0, 1))
        down = (None if g is None else g.to(x.dtype) for g, x in zip(found, sources, strict=True))
        return (*down, dS, dz[..., 0], None, None, None, None)
