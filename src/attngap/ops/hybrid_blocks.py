"""Hybrid attention over a piece of a sequence, block by block, with a hand-written backward.

With P the near weights exp(l - m), T the staircase of far products fq.fk in the band, S and z the sums over the tokens
before it and c = exp(log_gain - m), a block's rows are (P V + c (T V + fq S)) / n, n the same sum without values.
Backward goes twice over the blocks: forward in time with S for everything in the band, then backward in time with the
gradient of S. Kept for it, beyond inputs and outputs, are three numbers a row.
"""

import math

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attngap.ops.hybrid_layout import Block, Layout, Masks, Track, put_rows, row_scalars, rows

EPS = 1e-6


def safe(n: Tensor) -> Tensor:
    """A normalizer closer to zero than EPS is replaced by EPS with its sign."""
    return torch.where(n.abs() < EPS, torch.where(n < 0, -EPS, EPS).to(n), n)


def combine(top: Tensor, lift: Tensor, mass: Tensor) -> tuple[Tensor, Tensor]:
    """The log-unit m a row is measured in, and exp(lift - m), the weight of its features in that unit.

    m is the larger of the largest near logit and the log of the far mass: neither side overflows and, for positive
    features, the normalizer is at least one. Where there is no far mass the features count for nothing, and their
    coefficient is only kept finite.
    """
    limits = torch.finfo(mass.dtype)
    size = mass.abs()
    log_mass = size.log().masked_fill_(size < limits.tiny, -torch.inf)
    unit = torch.maximum(top, lift + log_mass)
    return unit, (lift - unit).clamp_(max=math.log(limits.max) - 1).exp_()


class HybridBlocks(torch.autograd.Function):
    """(q, k, v, fq, fk, log_gain, past k, v, fk, S, z) -> (out, S, z) for a piece whose layout all sequences share."""

    @staticmethod
    def forward(ctx, q, k, v, fq, fk, gain, past_k, past_v, past_fk, S, z, layout, scale, relative):
        b, h, t, _ = q.shape
        kv, acc = k.shape[1], S.dtype
        keys, values, features = _tracks(layout, (past_k, past_v, past_fk), (k, v, fk))
        start = S.reshape(b * kv, *S.shape[2:]), z.reshape(b * kv, -1, 1)
        S, z = start[0].clone(), start[1].clone()
        out = q.new_empty(b, h, t, v.shape[3])
        unit, norm, coefficient = (q.new_empty(b, h, t, dtype=acc) for _ in range(3))
        masks = Masks(layout, h // kv, S)
        for block in layout.blocks():
            K = keys.read(block.start, block.stop, acc, sinks=True)
            V = values.read(block.start, block.stop, acc, sinks=True)
            leave = slice(layout.sinks, layout.sinks + block.leaving)
            P = torch.baddbmm(masks.near(block), rows(q, block, kv, acc) * scale, K.mT)
            top = P.amax(-1, keepdim=True)
            lift = row_scalars(gain, block, kv)
            Q = rows(fq, block, kv, acc)
            mass = Q @ z
            if block.leaving:
                F = features.read(block.start, block.end, acc)
                T = (Q @ F.mT).mul_(masks.far(block))
                mass += T.sum(-1, keepdim=True)
            m, c = combine(top, lift + top if relative else lift, mass)
            P.sub_(m).exp_()
            n = P.sum(-1, keepdim=True).addcmul_(mass, c)
            if block.leaving:
                P[..., leave].addcmul_(T, c)
            put_rows(out, block, torch.bmm(P, V).baddbmm_(Q * c, S).div_(safe(n)))
            for store, value in ((unit, m), (norm, n), (coefficient, c)):
                put_rows(store, block, value)
            if block.leaving:
                S.baddbmm_(F.mT, V[:, leave])
                z += F.sum(1)[..., None]
        ctx.save_for_backward(q, k, v, fq, fk, past_k, past_v, past_fk, *start, out, unit, norm, coefficient)
        ctx.options = layout, scale, relative
        ctx.set_materialize_grads(False)
        return out, S.view(b, kv, *S.shape[1:]), z.view(b, kv, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out, dS, dz):
        q, k, v, fq, fk, past_k, past_v, past_fk, S, z, out, unit, norm, coefficient = ctx.saved_tensors
        layout, scale, relative = ctx.options
        b, h = q.shape[:2]
        kv, acc = k.shape[1], S.dtype
        sources = q, k, v, fq, fk, unit, past_k, past_v, past_fk
        grads = [
            torch.zeros(x.shape, dtype=acc, device=x.device) if wanted and x is not None else None
            for x, wanted in zip(sources, ctx.needs_input_grad[:9], strict=True)
        ]
        dq, dk, dv, dfq, dfk, dgain, *dpast = grads
        keys, values, features = _tracks(layout, (past_k, past_v, past_fk), (k, v, fk))
        d_keys, d_values, d_features = _tracks(layout, dpast, (dk, dv, dfk))
        near_wanted = dq is not None or d_keys.wanted or d_values.wanted
        d_out = torch.zeros_like(out) if d_out is None else d_out
        masks = Masks(layout, h // kv, S)

        def row_grads(block: Block) -> tuple[Tensor, Tensor, Tensor]:
            """The gradient of a row's raw weights is g.v_j - D."""
            n = row_scalars(norm, block, kv)
            g = rows(d_out, block, kv, acc) / safe(n)
            D = (g * rows(out, block, kv, acc)).sum(-1, keepdim=True)
            return g, D.masked_fill_(n.abs() < EPS, 0.0), row_scalars(coefficient, block, kv)

        S, z = S.clone(), z.clone()
        for block in layout.blocks():
            leave = slice(layout.sinks, layout.sinks + block.leaving)
            V = values.read(block.start, block.stop, acc, sinks=True)
            g, D, c = row_grads(block)
            Q = rows(fq, block, kv, acc)
            dQ = torch.bmm(g, S.mT).baddbmm_(D, z.mT, alpha=-1)
            if block.leaving:
                F = features.read(block.start, block.end, acc)
                dT = (g @ V[:, leave].mT).sub_(D).mul_(masks.far(block))
                dQ.baddbmm_(dT, F)
                if d_features.wanted:
                    d_features.add(dT.mul_(c).mT @ Q, block.start, block.end)
            dQ *= c
            put_rows(dfq, block, dQ)
            d_lift = (dQ * Q).sum(-1, keepdim=True)
            put_rows(dgain, block, d_lift)
            if near_wanted:
                K = keys.read(block.start, block.stop, acc, sinks=True)
                X = rows(q, block, kv, acc) * scale
                logits = torch.baddbmm(masks.near(block), X, K.mT)
                P = (logits - row_scalars(unit, block, kv)).exp_()
                dL = (g @ V.mT).sub_(D).mul_(P)
                if relative:
                    ties = logits == logits.amax(-1, keepdim=True)
                    dL += d_lift * ties / ties.sum(-1, keepdim=True)
                put_rows(dq, block, (dL @ K).mul_(scale))
                d_keys.add(dL.mT @ X, block.start, block.stop, sinks=True)
                if block.leaving:
                    P[..., leave].addcmul_((Q @ F.mT).mul_(masks.far(block)), c)
                d_values.add(P.mT @ g, block.start, block.stop, sinks=True)
            if block.leaving:
                S.baddbmm_(F.mT, V[:, leave])
                z += F.sum(1)[..., None]
        dS = torch.zeros_like(S) if dS is None else dS.reshape(S.shape).clone()
        dz = torch.zeros_like(z) if dz is None else dz.reshape(z.shape).clone()
        for block in reversed(layout.blocks()):
            if block.leaving:
                V = values.read(block.start, block.end, acc)
                F = features.read(block.start, block.end, acc)
                d_features.add((V @ dS.mT).add_(dz.mT), block.start, block.end)
                d_values.add(F @ dS, block.start, block.end)
            g, D, c = row_grads(block)
            Q = rows(fq, block, kv, acc) * c
            dS.baddbmm_(Q.mT, g)
            dz.baddbmm_(Q.mT, D, alpha=-1)
        down = [None if g is None else g.to(x.dtype) for g, x in zip(grads, sources, strict=True)]
        return (*down, dS.view(b, kv, *dS.shape[1:]), dz.view(b, kv, -1), None, None, None)


def _tracks(layout: Layout, past, new) -> tuple[Track, ...]:
    skips = (layout.old_sinks, layout.old_sinks, 0)  # the features of sinks are never read, so they are not kept
    return tuple(Track(layout, x, y, skip=skip) for x, y, skip in zip(past, new, skips, strict=True))
