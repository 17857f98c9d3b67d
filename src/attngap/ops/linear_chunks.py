"""Causal linear attention chunk by chunk, forward and backward, in memory that does not grow with the sequence.

With carried state S, z and A the scores inside a chunk (see `decay`), a chunk's rows are read(q) S + A v over
read(q) z + A 1. The backward runs twice over the chunks. Forward in time it carries S again and finds dq and the part
of dk from inside a chunk; backward in time it carries R, the gradient of the state, and finds dv and the rest of dk.
"""

import dataclasses

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attngap.ops.chunks import Chunked, Scratch, chunk_sizes
from attngap.ops.decay import NoDecay, ScalarDecay, VectorDecay

EPS = 1e-6  # the rule for vanishing normalizers, stated in `naive.linear_attention`


@dataclasses.dataclass(frozen=True)
class Setting:
    heads: int  # of the state: those of k, or those of q where a group's heads do not share a decay
    chunk: int
    dtype: torch.dtype  # that sums and states are kept in


class LinearChunks(torch.autograd.Function):
    """(q, k, v, log_decay (b, heads, t, 1 or r) or None, S, z or None if unnormalized, mask, setting) -> out, S, z."""

    @staticmethod
    def forward(ctx, q, k, v, log_decay, S, z, mask, setting: Setting):
        run = Run(q, k, v, log_decay, mask, setting)
        out = torch.empty(*q.shape[:3], v.shape[-1], dtype=v.dtype, device=v.device)
        state, rows = Carried(S, z), run.chunked(out)
        for i in range(len(run.sizes)):
            q_i, k_i, v_i, read = run.enter(i)
            scores = run.decay.scores(q_i, k_i)
            place = rows.target(i, run.scratch, "rows")
            top = place if z is None else run.scratch("top", *place.shape)
            torch.bmm(read, state.S, out=top).baddbmm_(scores, v_i)
            if state.z is not None:
                torch.mul(top, safe(_normalizer(scores, read, state.z)).reciprocal_(), out=place)
            rows.write(i, place)
            state.advance(run.decay, run.decay.write(k_i), v_i)
        ctx.save_for_backward(q, k, v, log_decay, S, z, mask, out)
        ctx.setting = setting
        return out, *state.by_heads(setting.heads)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out, dS, dz):
        q, k, v, log_decay, S, z, mask, out = ctx.saved_tensors
        run = Run(q, k, v, log_decay, mask, ctx.setting)
        grads = _Grads(run, q, k, v, log_decay)
        d_rows = run.chunked(d_out)
        last = _forward_in_time(run, grads, d_rows, run.chunked(out), Carried(S, z))
        first = _backward_in_time(run, grads, d_rows, Carried(dS, None if z is None else dz), last)
        return grads.q, grads.k, grads.v, grads.log_decay, *first.by_heads(ctx.setting.heads), None, None


class Run:
    """The inputs as chunks, and what the chunk at hand needs."""

    def __init__(self, q, k, v, log_decay, mask, setting: Setting):
        self.setting, self.mask = setting, mask
        self.scratch = Scratch(q, setting.dtype)
        kind = NoDecay if log_decay is None else ScalarDecay if log_decay.shape[-1] == 1 else VectorDecay
        self.decay = kind(self.scratch)
        chunk = 1 << (setting.chunk.bit_length() - 1) if kind.halving else setting.chunk
        self.sizes = chunk_sizes(q.shape[2], chunk, halving=kind.halving)
        self.q, self.k, self.v = (self.chunked(x) for x in (q, k, v))
        self.log_decay = None if log_decay is None else self.chunked(log_decay)

    def chunked(self, x: Tensor) -> Chunked:
        return Chunked(x, self.setting.heads, self.sizes, self.setting.dtype, self.mask)

    def enter(self, i: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        q = self.q[i]
        self.decay.enter(None if self.log_decay is None else self.log_decay[i])
        return q, self.k[i], self.v[i], self.decay.read(q)


class Carried:
    """S (n, r, dv) and z (n, r, 1), overwritten as the chunks go by."""

    def __init__(self, S: Tensor, z: Tensor | None):
        self.S = S.flatten(0, 1).clone()
        self.z = None if z is None else z.flatten(0, 1)[..., None].clone()

    def by_heads(self, heads: int) -> tuple[Tensor, Tensor | None]:
        """(b, heads, r, dv) and (b, heads, r)."""
        S = self.S.unflatten(0, (-1, heads))
        return S, None if self.z is None else self.z.view(S.shape[:3])

    def advance(self, decay: NoDecay, k: Tensor, v: Tensor, weight: Tensor | None = None) -> None:
        """S <- keep S + k^T v, z <- keep z + k^T weight, a weight of None being ones."""
        decay.keep(self.S).baddbmm_(k.mT, v)
        if self.z is not None:
            decay.keep(self.z).add_(k.sum(1, keepdim=True).mT if weight is None else k.mT @ weight)


class _Grads:
    """The gradients, written chunk by chunk."""

    def __init__(self, run: Run, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None):
        self.q, self.k, self.v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        self.log_decay = None if log_decay is None else torch.empty_like(log_decay)
        self.dq, self.dk, self.dv = (run.chunked(x) for x in (self.q, self.k, self.v))
        self.dg = None if self.log_decay is None else run.chunked(self.log_decay)
        self.numbers = _RowNumbers(run, self.v, q.shape[1] // run.setting.heads)


class _RowNumbers:
    """Two numbers a row, from the first sweep to the second: 1 / normalizer, and the normalizer's gradient.

    They wait in the rows of dv, which only the second sweep fills, so that they cost no memory; in a buffer of their
    own where dv is narrower than they are, is shared by heads, or is kept in a shorter type.
    """

    def __init__(self, run: Run, dv: Tensor, group: int):
        b, h, t, width = dv.shape
        heads = run.setting.heads
        fits = h == heads and dv.dtype == run.setting.dtype and 2 * group <= width
        room = dv if fits else dv.new_empty((b, heads, t, 2 * group), dtype=run.setting.dtype)
        self.pieces = room.view(b * heads, t, -1)[..., : 2 * group].split(run.sizes, 1)

    def put(self, i: int, inverse: Tensor, gradient: Tensor) -> None:
        n, c, _ = self.pieces[i].shape
        here = torch.cat([inverse.view(n, -1, c), gradient.view(n, -1, c)], 1)  # (n, 2 group, c)
        self.pieces[i].copy_(here.mT)

    def get(self, i: int) -> tuple[Tensor, Tensor]:
        n = self.pieces[i].shape[0]
        inverse, gradient = self.pieces[i].mT.contiguous().view(n, 2, -1, 1).unbind(1)
        return inverse, gradient


def _forward_in_time(run: Run, grads: _Grads, d_rows: Chunked, rows: Chunked, state: Carried) -> Carried:
    scratch, decay = run.scratch, run.decay
    for i in range(len(run.sizes)):
        q, k, v, read = run.enter(i)
        above, weight = d_rows[i], None  # gradients of the rows before and of the rows' normalizers
        d_scores = scratch("d_scores", q.shape[0], q.shape[1], k.shape[1])
        if state.z is None:
            torch.bmm(above, v.mT, out=d_scores)
        else:
            normalizer = _normalizer(decay.scores(q, k), read, state.z)
            inverse = safe(normalizer).reciprocal_()
            above = torch.mul(above, inverse, out=scratch("above", *above.shape))
            weight = torch.mul(above, rows[i], out=scratch("product", *above.shape)).sum(-1, keepdim=True).neg_()
            weight.masked_fill_(normalizer.abs() < EPS, 0.0)  # a replaced normalizer is a constant
            grads.numbers.put(i, inverse, weight)
            torch.baddbmm(weight, above, v.mT, out=d_scores)
        dq, dk = grads.dq.target(i, scratch, "dq"), grads.dk.target(i, scratch, "dk")
        decay.score_grads(d_scores, q, k, dq, dk)
        seen = torch.bmm(above, state.S.mT, out=scratch("seen", *q.shape))
        if weight is not None and state.z is not None:
            seen.baddbmm_(weight, state.z.mT)
        dq.add_(decay.read(seen))
        grads.dq.write(i, dq)
        grads.dk.write(i, dk)
        if grads.dg is not None:
            balance = (q * dq).view(k.shape[0], -1, *k.shape[1:]).sum(1) - k * dk
            grads.dg.write(i, _per_decay(balance, grads.dg))
        state.advance(decay, decay.write(k), v)
    return state


def _backward_in_time(run: Run, grads: _Grads, d_rows: Chunked, R: Carried, last: Carried) -> Carried:
    scratch, decay = run.scratch, run.decay
    later = None if grads.dg is None else _per_decay(_state_product(R, last), grads.dg)  # (n, 1, 1 or r)
    for i in reversed(range(len(run.sizes))):
        q, k, v, read = run.enter(i)
        above, weight = d_rows[i], None
        if R.z is not None:
            inverse, weight = grads.numbers.get(i)
            above = torch.mul(above, inverse, out=scratch("above", *above.shape))
        dv = grads.dv.target(i, scratch, "dv")
        torch.bmm(decay.scores(q, k).mT, above, out=dv).baddbmm_(decay.write(k), R.S)
        grads.dv.write(i, dv)
        kept = torch.bmm(v, R.S.mT, out=scratch("kept", *k.shape))
        if R.z is not None:
            kept.add_(R.z.mT)
        kept = decay.write(kept)
        grads.dk.add(i, kept)
        if grads.dg is not None and later is not None:
            # d log_decay_i = what the pairs across i carry = sum over tokens from i on of q . dq - k . dk
            balance = grads.dg[i] - _per_decay(k * kept, grads.dg)
            after = balance.flip(1).cumsum(1).flip(1) + later
            later = after[:, :1]
            grads.dg.write(i, after)
        R.advance(decay, read, above, weight)
    return R


def _state_product(a: Carried, b: Carried) -> Tensor:
    """<a, b> a channel, (n, 1, r)."""
    product = (a.S * b.S).sum(-1)
    if a.z is not None and b.z is not None:
        product += (a.z * b.z).sum(-1)
    return product[:, None]


def _per_decay(x: Tensor, decay: Chunked) -> Tensor:
    """(n, c, r) summed over the channels that share a decay."""
    return x.sum(-1, keepdim=True) if decay.shape[-1] == 1 else x


def _normalizer(scores: Tensor, read: Tensor, z: Tensor) -> Tensor:
    return torch.bmm(read, z).add_(scores.sum(-1, keepdim=True))  # (n, rows, 1)


def safe(n: Tensor) -> Tensor:
    """|n| below EPS becomes EPS with the sign of n; a sum that starts from +0 is never -0, so 0 counts as positive."""
    return torch.copysign(n.abs().clamp_min_(EPS), n)
