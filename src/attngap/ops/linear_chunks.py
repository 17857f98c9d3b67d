"""Causal linear attention in groups of chunks, forward and backward, in memory that does not grow with the sequence.

With S, z the state before a chunk and A the scores inside it (see `decay`), a chunk's rows are read(q) S + A v over
read(q) z + A 1. All products of a group of chunks are one batch, small enough to stay in cache; only the states are
carried from chunk to chunk. The backward runs twice over the groups. Forward in time it carries S again and finds dq
and the part of dk from inside a chunk; backward in time it carries the gradient of the state, and finds dv and the rest
of dk.
"""

import dataclasses

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attngap.ops import pages
from attngap.ops.chunks import Scratch
from attngap.ops.decay import NoDecay, ScalarDecay, VectorDecay
from attngap.ops.delta_groups import Folded, Span, spans

SMALL = 2**14  # floats of a state below which one running sum is cheaper than a call a chunk
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
        run, state = Run(q, k, v, log_decay, mask, setting), Carried(S, z)
        out = pages.empty((*q.shape[:3], v.shape[-1]), v.dtype, v.device)
        rows = run.folded(out)
        for span in run.spans:
            run.enter(span)
            before = state.advance(run, run.written, run.v)
            scores = run.decay.scores(run.q, run.k)
            top = run.scratch("top", *run.q.shape[:2], v.shape[-1])
            torch.bmm(run.read, before.S, out=top).baddbmm_(scores, run.v)
            if before.z is None:
                rows.write(span, top)
            else:
                rows.write(span, top, factor=safe(_normalizer(scores, run.read, before.z)).reciprocal_())
        ctx.save_for_backward(q, k, v, log_decay, S, z, mask, out)
        ctx.setting = setting
        return out, *state.by_heads(setting.heads)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out, dS, dz):
        q, k, v, log_decay, S, z, mask, out = ctx.saved_tensors
        run = Run(q, k, v, log_decay, mask, ctx.setting)
        grads = Grads(run, q, k, v, log_decay, d_out, out)
        state, back = Carried(S, z), Carried(dS, None if z is None else dz)
        for span in run.spans:
            run.enter(span)
            grads.forward_in_time(span, state.advance(run, run.written, run.v))
        grads.begin_back(state, back)
        for span in reversed(run.spans):
            run.enter(span)
            grads.backward_in_time(span, back)
        return grads.q, grads.k, grads.v, grads.log_decay, *back.by_heads(ctx.setting.heads), None, None


class Run:
    """The inputs in groups of chunks, and what the group at hand needs; m is chunks times n = b heads."""

    q: Tensor  # (m, group c, r)
    k: Tensor  # (m, c, r)
    v: Tensor  # (m, c, dv)
    read: Tensor  # q as it sees the state before its chunk
    written: Tensor  # k as it is left in the state after its chunk

    def __init__(self, q, k, v, log_decay, mask, setting: Setting):
        self.setting, self.mask, self.scratch = setting, mask, Scratch(q, setting.dtype)
        kind = NoDecay if log_decay is None else ScalarDecay if log_decay.shape[-1] == 1 else VectorDecay
        self.decay = kind(self.scratch)
        self.n = q.shape[0] * setting.heads
        widest = max(q.shape[3], v.shape[3], setting.chunk)  # of q, v and the scores
        self.spans = spans(q.shape[2], setting.chunk, q.shape[0] * q.shape[1] * widest, halving=kind.halving)
        self.inputs = [self.folded(x) for x in (q, k, v)]
        self.log_decay = None if log_decay is None else self.folded(log_decay)

    def folded(self, x: Tensor) -> Folded:
        return Folded(x, self.setting.heads, self.setting.dtype, self.mask)

    def load(self, name: str, x: Folded, span: Span) -> Tensor:
        return x.read(span, self.scratch(name, span.count * self.n, x.rows(span), x.x.shape[3]))

    def enter(self, span: Span) -> None:
        self.q, self.k, self.v = (self.load(name, x, span) for name, x in zip("qkv", self.inputs, strict=True))
        self.decay.enter(None if self.log_decay is None else self.load("log_decay", self.log_decay, span))
        self.read, self.written = self.decay.read(self.q), self.decay.write(self.k)


class Carried:
    """S (n, r, dv) and z (n, r, 1) between groups; or their gradients."""

    def __init__(self, S: Tensor, z: Tensor | None):
        self.S = S.flatten(0, 1)
        self.z = None if z is None else z.flatten(0, 1)[..., None]

    def by_heads(self, heads: int) -> tuple[Tensor, Tensor | None]:
        """(b, heads, r, dv) and (b, heads, r)."""
        S = self.S.unflatten(0, (-1, heads))
        return S, None if self.z is None else self.z.reshape(S.shape[:3])

    def advance(self, run: Run, k: Tensor, v: Tensor, weight: Tensor | None = None, *, back: bool = False) -> "States":
        """S <- kept S + k^T v, z <- kept z + k^T weight (ones if None) over the chunks; what each began with."""
        m, _, r = k.shape
        parts = torch.bmm(k.mT, v, out=run.scratch("parts", m, r, v.shape[-1]))
        S, self.S = _carry(self.S, parts, run.decay.kept, run.scratch("S", *parts.shape), back)
        if self.z is None:
            return States(S, None)
        parts = k.sum(1, keepdim=True).mT if weight is None else torch.bmm(k.mT, weight)
        z, self.z = _carry(self.z, parts, run.decay.kept, run.scratch("z", m, r, 1), back)
        return States(S, z)


@dataclasses.dataclass(frozen=True)
class States:
    """What every chunk of a group starts from."""

    S: Tensor  # (m, r, dv)
    z: Tensor | None  # (m, r, 1)


class Grads:
    """The gradients, written group by group."""

    def __init__(self, run: Run, q, k, v, log_decay: Tensor | None, d_out: Tensor, out: Tensor):
        self.run, self.d_rows, self.rows = run, run.folded(d_out), run.folded(out)
        self.q, self.k, self.v = (pages.empty_like(x) for x in (q, k, v))
        self.log_decay = None if log_decay is None else pages.empty_like(log_decay)
        self.dq, self.dk, self.dv = (run.folded(x) for x in (self.q, self.k, self.v))
        self.dg = None if self.log_decay is None else run.folded(self.log_decay)
        self.numbers = RowNumbers(run, self.v, q.shape[1] // run.setting.heads)

    def forward_in_time(self, span: Span, before: States) -> None:
        run, scratch, decay = self.run, self.run.scratch, self.run.decay
        # The gradients of the rows' numerators and of their normalizers.
        above, weight = run.load("d_rows", self.d_rows, span), None
        d_scores = scratch("d_scores", *run.q.shape[:2], run.k.shape[1])
        if before.z is None:
            torch.bmm(above, run.v.mT, out=d_scores)
        else:
            normalizer = _normalizer(decay.scores(run.q, run.k), run.read, before.z)
            inverse = safe(normalizer).reciprocal_()
            above = torch.mul(above, inverse, out=scratch("above", *above.shape))
            weight = torch.linalg.vecdot(above, run.load("rows", self.rows, span)).neg_()[..., None]
            weight.masked_fill_(normalizer.abs() < EPS, 0.0)  # a replaced normalizer is a constant
            self.numbers.put(span, inverse, weight)
            torch.baddbmm(weight, above, run.v.mT, out=d_scores)
        dq, dk = scratch("dq", *run.q.shape), scratch("dk", *run.k.shape)
        decay.score_grads(d_scores, run.q, run.k, dq, dk)
        seen = torch.bmm(above, before.S.mT, out=scratch("seen", *run.q.shape))
        if weight is not None and before.z is not None:
            seen.baddbmm_(weight, before.z.mT)
        dq.add_(decay.read(seen))
        self.dq.write(span, dq)
        self.dk.write(span, dk)
        if self.dg is not None:
            balance = (run.q * dq).view(run.k.shape[0], -1, *run.k.shape[1:]).sum(1) - run.k * dk
            self.dg.write(span, self._per_decay(balance))

    def begin_back(self, state: Carried, back: Carried) -> None:
        """Between the sweeps: what the last state says of the decays before it."""
        product = (state.S * back.S).sum(-1)
        if state.z is not None and back.z is not None:
            product += (state.z * back.z).sum(-1)
        self.later = self._per_decay(product[:, None])  # (n, 1, 1 or r)

    def backward_in_time(self, span: Span, back: Carried) -> None:
        run, scratch, decay = self.run, self.run.scratch, self.run.decay
        above, weight = run.load("d_rows", self.d_rows, span), None
        if back.z is not None:
            inverse, weight = self.numbers.get(span)
            above = torch.mul(above, inverse, out=scratch("above", *above.shape))
        after = back.advance(run, run.read, above, weight, back=True)
        dv = torch.bmm(decay.scores(run.q, run.k).mT, above, out=scratch("dv", *run.v.shape))
        self.dv.write(span, dv.baddbmm_(run.written, after.S))
        dk = scratch("dk", *run.k.shape)
        if after.z is None:
            torch.bmm(run.v, after.S.mT, out=dk)
        else:
            torch.baddbmm(after.z.mT, run.v, after.S.mT, out=dk)
        dk = decay.write(dk)
        self.dk.add(span, dk)
        if self.dg is not None:
            self._write_decay(span, self.dg.read(span) - self._per_decay(run.k * dk))

    def _write_decay(self, span: Span, balance: Tensor) -> None:
        """d log_decay_i is what the pairs across i carry: the sum over tokens from i on of q . dq - k . dk."""
        assert self.dg is not None
        balance = balance.unflatten(0, (span.count, -1)).transpose(0, 1)  # (n, count, c, 1 or r)
        crossing = balance.flatten(1, 2).flip(1).cumsum(1).flip(1) + self.later
        self.later = crossing[:, :1]
        self.dg.write(span, crossing.view(balance.shape).transpose(0, 1))

    def _per_decay(self, x: Tensor) -> Tensor:
        """(m, c, r) summed over the channels that share a decay."""
        return x if self.run.decay.halving else x.sum(-1, keepdim=True)


class RowNumbers:
    """Two numbers a row, from the first sweep to the second: 1 / normalizer, and the normalizer's gradient.

    They wait in the rows of dv, which only the second sweep fills, so that they cost no memory; in a buffer of their
    own where dv is narrower than they are, is shared by heads, or is kept in a shorter type.
    """

    def __init__(self, run: Run, dv: Tensor, group: int):
        b, h, t, width = dv.shape
        heads, dtype = run.setting.heads, run.setting.dtype
        fits = h == heads and dv.dtype == dtype and 2 * group <= width
        self.room = dv[..., : 2 * group] if fits else dv.new_empty((b, heads, t, 2 * group), dtype=dtype)

    def put(self, span: Span, inverse: Tensor, weight: Tensor) -> None:
        place = self._place(span)
        both = torch.stack((inverse[..., 0], weight[..., 0]), 1)  # (m, 2, group c)
        place.copy_(both.view(place.shape))

    def get(self, span: Span) -> tuple[Tensor, Tensor]:
        place = self._place(span)
        inverse, weight = place.reshape(-1, 2, place.shape[3] // 2 * span.chunk, 1).unbind(1)
        return inverse, weight

    def _place(self, span: Span) -> Tensor:
        """(count, b, heads, 2 group, c), a view."""
        rows = self.room[:, :, span.start : span.start + span.length]
        return rows.unflatten(2, (span.count, span.chunk)).permute(2, 0, 1, 4, 3)


def safe(n: Tensor) -> Tensor:
    """|n| below EPS becomes EPS with the sign of n; a sum that starts from +0 is never -0, so 0 counts as positive."""
    return torch.copysign(n.abs().clamp_min_(EPS), n)


def _normalizer(scores: Tensor, read: Tensor, z: Tensor) -> Tensor:
    # A product with ones, three times as fast as a sum along the last axis.
    within = scores.view(-1, scores.shape[-1]) @ torch.ones_like(scores[0, 0])
    return torch.bmm(read, z).add_(within.view(*scores.shape[:2], 1))  # (m, rows, 1)


def _carry(start: Tensor, parts: Tensor, kept: Tensor | None, states: Tensor, back: bool) -> tuple[Tensor, Tensor]:
    """x <- kept x + part over the chunks of a group, or back over them: what each starts from, and where it ends."""
    n = start.shape[0]
    if kept is None and start.numel() < SMALL:
        parts = parts.unflatten(0, (-1, n))
        sums = torch.cat((start[None], parts.flip(0) if back else parts)).cumsum_(0)
        return (sums[:-1].flip(0) if back else sums[:-1]).flatten(0, 1), sums[-1]
    places, parts_of = states.split(n), parts.split(n)
    kept_of = None if kept is None else kept.split(n)
    order = list(range(len(places)))[:: -1 if back else 1]
    places[order[0]].copy_(start)
    end = torch.empty_like(start)
    for i, j in enumerate(order):
        place = places[order[i + 1]] if i + 1 < len(order) else end
        if kept_of is None:
            torch.add(places[j], parts_of[j], out=place)
        else:
            torch.addcmul(parts_of[j], places[j], kept_of[j], out=place)
    return states, end
