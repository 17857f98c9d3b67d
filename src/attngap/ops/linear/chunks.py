"""Causal linear attention in groups of chunks, forward and backward, in memory that does not grow with the sequence.

With S, z the state before a chunk and A the scores inside it (see `decay`), a chunk's rows are read(q) S + A v over
read(q) z + A 1. A few lanes, each a head of a sequence, are walked to their end before the next few: the chunks of one
lane lie in memory as a batch of matrices, so that products read the inputs and write the results where they are. All
products of a group of chunks are one batch, small enough to stay in cache, and so are its states.

The backward first runs forward in time for the state before every group, which waits in the rows of dv that the group
will fill. Then it goes back over the groups with the gradient of the state.
"""

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attngap.ops import groups, native, pages
from attngap.ops.chunks import Scratch
from attngap.ops.decay import NoDecay, ScalarDecay, VectorDecay
from attngap.ops.groups import ChunkView, Span, spans
from attngap.ops.linear import compiled
from attngap.ops.native.tensors import plain_grads
from attngap.ops.normalizer import EPS, safe_normalizer


@dataclasses.dataclass(frozen=True)
class Setting:
    heads: int  # of the state: those of k, or those of q where a group's heads do not share a decay
    chunk: int
    dtype: torch.dtype  # that sums and states are kept in
    native: bool = False  # by compiled kernels, where these can be used


class LinearChunks(torch.autograd.Function):
    """(q, k, v, log_decay (b, ., t, 1 or r) or None, S, z or None if unnormalized, mask, setting) -> out, S, z."""

    @staticmethod
    def forward(ctx, q, k, v, log_decay, S, z, mask, setting: Setting):
        ctx.setting, ctx.native = setting, setting.native and native.usable(q, k, v, log_decay, state=S)
        if ctx.native:
            out, after_S, after_z = compiled.forward(q, k, v, log_decay, S, z, mask)
            ctx.save_for_backward(q, k, v, log_decay, S, z, mask, out)
            return out, after_S, after_z
        out = pages.empty((*q.shape[:3], v.shape[-1]), v.dtype, v.device)
        after_S, after_z = _like(S), None if z is None else _like(z)
        for lanes, run in runs(q, k, v, log_decay, mask, setting):
            state, rows = Carried(lanes(S), lanes.maybe(z)), run.folded(lanes(out))
            for span in run.spans:
                run.load_group(span)
                before = state.advance(run, run.written, run.v)
                scores, place = run.decay.scores(run.q, run.k), run.place("top", rows, span)
                torch.bmm(run.read, before.S, out=place.value).baddbmm_(scores, run.v)
                place.finish(None if before.z is None else 1 / safe_normalizer(_normalizer(scores, run.read, before.z)))
            state.put(lanes(after_S), lanes.maybe(after_z))
        ctx.save_for_backward(q, k, v, log_decay, S, z, mask, out)
        return out, after_S, after_z

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out, dS, dz):
        q, k, v, log_decay, S, z, mask, out = ctx.saved_tensors
        if ctx.native:
            wanted = ctx.needs_input_grad[3]
            d_out, dS, dz = plain_grads(d_out, dS, dz)
            return *compiled.backward(q, k, v, log_decay, S, z, mask, out, d_out, dS, dz, wanted), None, None
        found = [pages.empty_like(x) for x in (q, k, v)]
        d_decay = pages.empty_like(log_decay) if ctx.needs_input_grad[3] else None
        before_S, before_z = _like(S), None if z is None else _like(z)
        for lanes, run in runs(q, k, v, log_decay, mask, ctx.setting):
            grads = LinearGrads(run, [lanes(x) for x in found], lanes.maybe(d_decay), lanes(d_out), lanes(out))
            state = Carried(lanes(S), lanes.maybe(z))
            back = Carried(lanes(dS), None if z is None else lanes(dz))
            saved = SavedStates(grads.v, run.heads, ctx.setting.dtype)
            for span in run.spans[:-1]:
                saved.put(span, state)
                run.load_keys(span)
                state.advance(run, run.written, run.v)
            for span in reversed(run.spans):
                run.load_group(span)
                grads.group(span, state if span is run.spans[-1] else saved.get(span), back)
            back.put(lanes(before_S), lanes.maybe(before_z))
        return *found, d_decay, before_S, before_z, None, None


class Lanes:
    """Some sequences and some heads of the state, and what belongs to them in a tensor of any number of heads."""

    def __init__(self, batch: slice, first: int, stop: int, heads: int):
        self.batch, self.first, self.stop, self.heads = batch, first, stop, heads

    def __call__(self, x: Tensor) -> Tensor:
        h = x.shape[1]
        return x[self.batch, self.first * h // self.heads : self.stop * h // self.heads]

    def maybe(self, x: Tensor | None) -> Tensor | None:
        return None if x is None else self(x)


def runs(q, k, v, log_decay, mask, setting: Setting) -> Iterator[tuple[Lanes, "LinearInputs"]]:
    """Lane after lane, or several where sequences are short."""
    b, h, t, r = q.shape
    scratch = Scratch(q, setting.dtype)
    kind = NoDecay if log_decay is None else ScalarDecay if log_decay.shape[-1] == 1 else VectorDecay
    decay, widest = kind(scratch), max(r, v.shape[3], setting.chunk)  # of q, v and the scores
    most = max(1, groups.GROUP // (h // setting.heads * setting.chunk * widest))
    shared = setting.heads // k.shape[1]
    at_once = max(1, most * setting.chunk // t // shared) * shared
    sequences, heads = max(1, at_once // setting.heads), min(at_once, setting.heads)
    for i in range(0, b, sequences):
        for first in range(0, setting.heads, heads):
            lanes = Lanes(slice(i, i + sequences), first, min(first + heads, setting.heads), setting.heads)
            part = None if mask is None else mask[lanes.batch]
            yield (
                lanes,
                LinearInputs([lanes(x) for x in (q, k, v)], lanes.maybe(log_decay), part, lanes, decay, most, setting),
            )


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the rows of a group are computed: in the result, or in a buffer that is copied there."""

    value: Tensor  # (m, rows, w)
    target: ChunkView
    span: Span
    direct: bool

    def finish(self, factor: Tensor | None = None) -> None:
        """All rows are there; `factor` (m, rows, 1) is still to be applied."""
        if not self.direct:
            self.target.write(self.span, self.value, factor)
        elif factor is not None:
            self.value.mul_(factor)


class LinearInputs:
    """The inputs of some lanes in groups of chunks, and what the group at hand needs; m is lanes times chunks."""

    q: Tensor  # (m, group c, r)
    k: Tensor  # (m, c, r)
    v: Tensor  # (m, c, dv)
    read: Tensor  # q as it sees the state before its chunk
    written: Tensor  # k as it is left in the state after its chunk

    def __init__(self, inputs, log_decay, mask, lanes: Lanes, decay: NoDecay, most: int, setting: Setting):
        self.mask, self.decay, self.scratch, self.dtype = mask, decay, decay.scratch, setting.dtype
        self.heads = lanes.stop - lanes.first
        q = inputs[0]
        count = q.shape[0] * self.heads
        self.spans = spans(q.shape[2], setting.chunk, max(1, most // count), halving=decay.halving)
        self.queries, self.keys, self.values = (self.folded(x) for x in inputs)
        self.log_decay = None if log_decay is None else self.folded(log_decay)

    def folded(self, x: Tensor) -> ChunkView:
        return ChunkView(x, self.heads, self.dtype, self.mask)

    def load(self, name: str, x: ChunkView, span: Span) -> Tensor:
        """(m, rows, w), in place where it can be."""
        found = x.view(span)
        return x.read(span, self.scratch(name, *x.shape(span))) if found is None else found

    def place(self, name: str, x: ChunkView, span: Span) -> Place:
        found = x.view(span)
        if found is not None and found.is_contiguous():  # products into strided places are done one by one
            return Place(found, x, span, direct=True)
        return Place(self.scratch(name, *x.shape(span)), x, span, direct=False)

    def load_group(self, span: Span) -> None:
        self.load_keys(span)
        self.q = self.load("q", self.queries, span)
        self.read = self.decay.read(self.q)

    def load_keys(self, span: Span) -> None:
        """As much as the state needs."""
        self.span = span
        self.k, self.v = self.load("k", self.keys, span), self.load("v", self.values, span)
        self.decay.begin_chunk(None if self.log_decay is None else self.load("log_decay", self.log_decay, span))
        self.written = self.decay.write(self.k)


class Carried:
    """S (n, r, dv) and z (n, r, 1) between groups; or their gradients."""

    def __init__(self, S: Tensor, z: Tensor | None):
        self.S = S.flatten(0, 1)
        self.z = None if z is None else z.flatten(0, 1)[..., None]

    def put(self, S: Tensor, z: Tensor | None) -> None:
        S.copy_(self.S.view(S.shape))
        if z is not None and self.z is not None:
            z.copy_(self.z.view(z.shape))

    def advance(
        self, run: LinearInputs, k: Tensor, v: Tensor, weight: Tensor | None = None, *, back: bool = False
    ) -> "States":
        """S <- kept S + k^T v, z <- kept z + k^T weight (ones if None) over the chunks; what each began with."""
        (m, _, r), dv, side = k.shape, v.shape[-1], "after" if back else "before"
        lanes = self.S.shape[0], run.span.count
        parts = torch.bmm(k.mT, v, out=run.scratch("parts", m, r, dv)).view(*lanes, r, dv)
        S = run.scratch(f"S {side}", *lanes, r, dv)
        self.S = run.decay.carry(self.S, parts, S, back=back)
        if self.z is None:
            return States(S.flatten(0, 1), None)
        parts = k.sum(1) if weight is None else torch.bmm(k.mT, weight)
        z = run.scratch(f"z {side}", *lanes, r, 1)
        self.z = run.decay.carry(self.z, parts.view(*lanes, r, 1), z, back=back)
        return States(S.flatten(0, 1), z.flatten(0, 1))


@dataclasses.dataclass(frozen=True)
class States:
    """What every chunk of a group starts from."""

    S: Tensor  # (m, r, dv)
    z: Tensor | None  # (m, r, 1)


class SavedStates:
    """The states before groups: S in the rows of dv where shape and type allow it, else in memory of its own."""

    def __init__(self, dv: ChunkView, heads: int, dtype: torch.dtype):
        self.dv = dv.x
        self.alike = self.dv.shape[1] == heads and self.dv.dtype == dtype
        self.held: dict[int, tuple[Tensor, Tensor | None]] = {}

    def put(self, span: Span, state: Carried) -> None:
        S, z = state.S, state.z
        by_heads = S.view(self.dv.shape[0], -1, *S.shape[1:])
        if self.alike and span.length >= S.shape[1]:
            by_heads = self.dv[:, :, span.start : span.start + S.shape[1]].copy_(by_heads)  # (b, heads, r, dv)
        self.held[span.start] = by_heads, None if z is None else z.view(*by_heads.shape[:3])

    def get(self, span: Span) -> Carried:
        return Carried(*self.held.pop(span.start))


class LinearGrads:
    """The gradients of some lanes, written group by group from the last to the first."""

    def __init__(self, run: LinearInputs, found: list[Tensor], d_decay: Tensor | None, d_out: Tensor, out: Tensor):
        self.run, self.d_rows, self.rows = run, run.folded(d_out), run.folded(out)
        self.q, self.k, self.v = (run.folded(x) for x in found)
        self.log_decay = None if d_decay is None else run.folded(d_decay)
        self.later: Tensor | None = None

    def group(self, span: Span, state: Carried, back: Carried) -> None:
        """`run` has entered the group; `state` goes from before it to after it, `back` from after it to before it."""
        run, decay = self.run, self.run.decay
        before = state.advance(run, run.written, run.v)
        if self.log_decay is not None and self.later is None:
            self.later = self._handed_on(state, back)
        scores = decay.scores(run.q, run.k)
        above, weight = self._rows(span, scores, before)
        after = back.advance(run, run.read, above, weight, back=True)
        dv, dq, dk = (run.place(name, x, span) for name, x in (("dv", self.v), ("dq", self.q), ("dk", self.k)))
        torch.bmm(scores.mT, above, out=dv.value).baddbmm_(run.written, after.S)
        dv.finish()
        if weight is None or before.z is None or after.z is None:
            d_scores = torch.bmm(above, run.v.mT, out=scores)
            torch.bmm(above, before.S.mT, out=dq.value)
            torch.bmm(run.v, after.S.mT, out=dk.value)
        else:
            d_scores = torch.baddbmm(weight, above, run.v.mT, out=scores)
            torch.mul(weight, before.z.mT, out=dq.value).baddbmm_(above, before.S.mT)
            torch.baddbmm(after.z.mT, run.v, after.S.mT, out=dk.value)
        decay.read(dq.value, out=dq.value)
        decay.write(dk.value, out=dk.value)
        decay.add_score_grads(d_scores, run.q, run.k, dq.value, dk.value)
        if self.log_decay is not None:
            self._write_decay(span, dq.value, dk.value)
        dq.finish()
        dk.finish()

    def _rows(self, span: Span, scores: Tensor, before: States) -> tuple[Tensor, Tensor | None]:
        """The gradients of the rows' numerators and of their normalizers."""
        run = self.run
        above = run.load("d_rows", self.d_rows, span)
        if before.z is None:
            return above, None
        normalizer = _normalizer(scores, run.read, before.z)
        above = torch.mul(above, safe_normalizer(normalizer).reciprocal_(), out=run.scratch("above", *above.shape))
        products = torch.mul(above, run.load("rows", self.rows, span), out=run.scratch("products", *above.shape))
        weight = _row_sums(products).neg_()
        return above, weight.masked_fill_(normalizer.abs() < EPS, 0.0)  # a replaced normalizer is a constant

    def _handed_on(self, state: Carried, back: Carried) -> Tensor:
        """What the last state says of the decays before it."""
        product = (state.S * back.S).sum(-1)
        if state.z is not None and back.z is not None:
            product += (state.z * back.z).sum(-1)
        return self._per_decay(product[:, None])  # (n, 1, 1 or r)

    def _write_decay(self, span: Span, dq: Tensor, dk: Tensor) -> None:
        """d log_decay_i is what the pairs across i carry: the sum over tokens from i on of q . dq - k . dk."""
        run = self.run
        assert self.log_decay is not None
        assert self.later is not None
        balance = (run.q * dq).unflatten(1, (-1, span.chunk)).sum(1) - run.k * dk
        balance = self._per_decay(balance).unflatten(0, (-1, span.count)).flatten(1, 2)  # (n, length, 1 or r)
        crossing = balance.flip(1).cumsum(1).flip(1) + self.later
        self.later = crossing[:, :1]
        self.log_decay.write(span, crossing.unflatten(1, (span.count, span.chunk)))

    def _per_decay(self, x: Tensor) -> Tensor:
        """(m, c, r) summed over the channels that share a decay."""
        return x if self.run.decay.halving else x.sum(-1, keepdim=True)


def _normalizer(scores: Tensor, read: Tensor, z: Tensor) -> Tensor:
    return torch.bmm(read, z).add_(_row_sums(scores))  # (m, rows, 1)


def _row_sums(x: Tensor) -> Tensor:
    # A product with ones, three times as fast as a sum along the last axis.
    return (x.view(-1, x.shape[-1]) @ torch.ones_like(x[0, 0])).view(*x.shape[:2], 1)


def _like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)
