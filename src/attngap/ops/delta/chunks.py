"""The delta rule chunk by chunk, forward and backward, in memory that does not grow with the sequence.

Inside a chunk (Yang et al., arXiv 2406.06484, 2412.06464) let A and M be the decayed products of queries and keys with
the keys up to and before them (see `decay`). What a token finds wrong in the memory is e_i = v_i - k_i . (what is
stored), so

    (I + M diag(beta)) E = V - read(k) S,    U = diag(beta) E,    out = read(q) S + A U,    S <- keep S + write(k)^T U

The system is unit-triangular: solved, not inverted, with the values as the only right-hand side. Whatever does not wait
for S is computed for a group of chunks at once. The backward needs the state before a chunk together with the gradient
of the state after it, so it first runs forward to find the state before every group; these wait in the rows of dv that
the group will fill, and cost no memory.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attngap.ops import groups, native, pages
from attngap.ops.chunks import Scratch
from attngap.ops.decay import NoDecay, ScalarDecay, VectorDecay
from attngap.ops.delta import compiled
from attngap.ops.groups import ChunkView, Span, spans
from attngap.ops.linear.chunks import Setting
from attngap.ops.native.tensors import plain_grads


class DeltaChunks(torch.autograd.Function):
    """(q, k, v, beta (b, ., t, 1), log_decay (b, ., t, 1 or r) or None, S, mask, setting) -> out, S."""

    @staticmethod
    def forward(ctx, q, k, v, beta, log_decay, S, mask, setting: Setting):
        ctx.setting = setting
        if setting.native and native.usable(q, k, v, beta, log_decay, state=S):
            keep = any(ctx.needs_input_grad) and q.shape[1] == k.shape[1]
            out, after, u = compiled.forward(q, k, v, beta, log_decay, S, mask, keep)
            ctx.save_for_backward(q, k, v, beta, log_decay, S, mask, u)
            return out, after
        ctx.save_for_backward(q, k, v, beta, log_decay, S, mask, None)
        run = DeltaInputs(q, k, v, beta, log_decay, mask, setting)
        out = pages.empty((*q.shape[:3], v.shape[-1]), v.dtype, v.device)
        rows, state = run.folded(out), S.flatten(0, 1).clone()
        for span in run.spans:
            run.load_group(span)
            seen = run.advance(state)
            queries = run.queries
            top = torch.bmm(
                run.scores[:, :queries], run.U, out=run.scratch("top", *run.scores[:, :queries].shape[:2], v.shape[-1])
            )
            rows.write(span, run.by_lanes(top.add_(seen[:, :queries])))
        return out, state.unflatten(0, (-1, setting.heads))

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out, dS):
        q, k, v, beta, log_decay, S, mask, u = ctx.saved_tensors
        if u is not None:
            wanted = ctx.needs_input_grad[4]
            d_out, dS = plain_grads(d_out, dS)
            return *compiled.backward(q, k, v, beta, log_decay, S, mask, u, d_out, dS, wanted), None, None
        run = DeltaInputs(q, k, v, beta, log_decay, mask, ctx.setting)
        grads = DeltaGrads(run, q, k, v, beta, log_decay, d_out)
        saved, state = SavedStates(run, grads.v), S.flatten(0, 1).clone()
        for span in run.spans[:-1]:
            saved.put(span, state)
            run.load_group(span)
            run.advance(state)
        R = dS.flatten(0, 1).clone()
        for span in reversed(run.spans):
            run.load_group(span)
            start = state if span is run.spans[-1] else saved.get(span)
            states = run.scratch("states", span.count + 1, *start.shape)
            states[0].copy_(start)
            run.advance(states[0], states)
            grads.group(span, states, R)
        return (
            grads.q,
            grads.k,
            grads.v,
            grads.beta,
            grads.log_decay,
            R.unflatten(0, (-1, ctx.setting.heads)),
            None,
            None,
        )


class DeltaInputs:
    """The inputs, folded into groups of chunks, and what the group at hand needs; m is chunks times n = b heads."""

    x: Tensor  # (m, group c + c, r): the queries of a group of heads, then the keys, which also ask the memory
    k: Tensor  # (m, c, r)
    v: Tensor  # (m, c, dv)
    beta: Tensor  # (m, c, 1)
    read: Tensor  # x as it sees the state before its chunk
    written: Tensor  # k as it is left in the state after its chunk
    keep: Tensor | None  # (m, 1 or r, 1) what is kept of the state before
    scores: Tensor  # (m, group c + c, c): A, then M with a diagonal that nobody reads
    system: Tensor  # (m, c, c) M diag(beta)
    U: Tensor  # (m, c, dv), by `advance`
    E: Tensor

    def __init__(self, q, k, v, beta, log_decay, mask, setting: Setting):
        self.setting, self.mask, self.scratch = setting, mask, Scratch(q, setting.dtype)
        kind = NoDecay if log_decay is None else ScalarDecay if log_decay.shape[-1] == 1 else VectorDecay
        self.decay = kind(self.scratch)
        self.n = q.shape[0] * setting.heads
        most = max(1, groups.GROUP // (setting.chunk * self.n * q.shape[3]))
        self.spans = spans(q.shape[2], setting.chunk, most, halving=kind.halving)
        self.inputs = [self.folded(x) for x in (q, k, v, beta)]
        self.log_decay = None if log_decay is None else self.folded(log_decay)

    def folded(self, x: Tensor) -> ChunkView:
        return ChunkView(x, self.setting.heads, self.setting.dtype, self.mask)

    def by_lanes(self, x: Tensor) -> Tensor:
        """From chunk after chunk, as the loop over them needs it, to (n, chunks, ...), a view."""
        return x.unflatten(0, (-1, self.n)).transpose(0, 1)

    def load(self, x: ChunkView, span: Span, place: Tensor) -> Tensor:
        x.read(span, self.by_lanes(place))
        return place

    def load_group(self, span: Span) -> None:
        scratch, (q, k, v, beta) = self.scratch, self.inputs
        m, c, (r, dv) = span.count * self.n, span.chunk, (k.x.shape[3], v.x.shape[3])
        self.queries = q.shape(span)[1]
        self.x = scratch("x", m, self.queries + c, r)
        self.load(q, span, self.x[:, : self.queries])
        self.k = self.load(k, span, self.x[:, self.queries :])
        self.v, self.beta = self.load(v, span, scratch("v", m, c, dv)), self.load(beta, span, scratch("beta", m, c, 1))
        g = self.log_decay
        g = None if g is None else self.load(g, span, scratch("g", m, c, g.x.shape[3]))
        self.decay.begin_chunk(g)
        self.read, self.written = self.decay.read(self.x), self.decay.write(self.k)
        self.keep = self.decay.kept
        self.scores = self.decay.scores(self.x, self.k)
        self.system = torch.mul(self.scores[:, self.queries :], self.beta.mT, out=scratch("system", m, c, c))

    def chunk(self, j: int) -> slice:
        return slice(j * self.n, (j + 1) * self.n)

    def advance(self, state: Tensor, states: Tensor | None = None) -> Tensor:
        """Over the group: U, E, and the state, in place or one after the other in `states`. Returns read(x) S."""
        m, c, dv = self.v.shape
        self.U, self.E = self.scratch("U", m, c, dv), self.scratch("E", m, c, dv)
        seen = self.scratch("seen", m, self.x.shape[1], dv)
        for j in range(m // self.n):
            at = self.chunk(j)
            asked = torch.bmm(self.read[at], state, out=seen[at])
            E = _solve(self.system[at], torch.sub(self.v[at], asked[:, self.queries :], out=self.E[at]))
            U = torch.mul(E, self.beta[at], out=self.U[at])
            if states is not None:
                self.E[at].copy_(E)
                state = states[j + 1].copy_(state)
            if self.keep is not None:
                state.mul_(self.keep[at])
            state.baddbmm_(self.written[at].mT, U)
        return seen


class SavedStates:
    """The states before groups: in the rows of dv where shape and type allow it, else in memory of their own."""

    def __init__(self, run: DeltaInputs, dv: Tensor):
        self.run, self.dv = run, dv
        self.alike = dv.shape[1] == run.setting.heads and dv.dtype == run.setting.dtype
        self.held: dict[int, Tensor] = {}

    def put(self, span: Span, state: Tensor) -> None:
        rank = state.shape[1]
        by_heads = state.unflatten(0, (-1, self.run.setting.heads))
        if self.alike and span.length >= rank:
            place = self.dv[:, :, span.start : span.start + rank]  # (b, heads, r, dv)
            self.held[span.start] = place.copy_(by_heads)
        else:
            self.held[span.start] = by_heads.clone()

    def get(self, span: Span) -> Tensor:
        return self.held.pop(span.start).flatten(0, 1)


class DeltaGrads:
    """The gradients, written group by group from the last to the first."""

    def __init__(self, run: DeltaInputs, q, k, v, beta, log_decay: Tensor | None, d_out: Tensor):
        self.run, self.d_out = run, run.folded(d_out)
        self.q, self.k, self.v, self.beta = (pages.empty_like(x) for x in (q, k, v, beta))
        self.log_decay = None if log_decay is None else pages.empty_like(log_decay)

    def group(self, span: Span, states: Tensor, R: Tensor) -> None:
        """`run` has entered and advanced over the group. R goes from after it to before it, in place."""
        run, decay, queries = self.run, self.run.decay, self.run.queries
        dU, dE, above, after = self._back_in_time(span, R)
        M = run.scores[:, queries:]
        M.diagonal(dim1=1, dim2=2).zero_()
        self._write(self.beta, span, dU.baddbmm_(M.mT, dE, alpha=-1).mul_(run.E).sum(-1, keepdim=True))
        self._write(self.v, span, dE)
        d_scores = torch.bmm(above, run.U.mT, out=run.scratch("d_scores", *run.scores.shape))
        d_scores[:, queries:].diagonal(dim1=1, dim2=2).zero_()
        dx, dk = run.scratch("dx", *run.x.shape), run.scratch("dk", *run.k.shape)
        decay.read(torch.bmm(above, states[:-1].flatten(0, 1).mT, out=dx), out=dx)
        decay.write(torch.bmm(run.U, after.mT, out=dk), out=dk)
        decay.add_score_grads(d_scores, run.x, run.k, dx, dk)
        if self.log_decay is not None:
            handed_on = (states[1:].flatten(0, 1) * after).sum(-1)[:, None]
            self._write(self.log_decay, span, self._crossing(dx, dk, handed_on))
        self._write(self.q, span, dx[:, :queries])
        self._write(self.k, span, dk.add_(dx[:, queries:]))

    def _back_in_time(self, span: Span, R: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The gradients of U, of V, of what queries and keys read, and of the state after each chunk."""
        run, scratch, queries = self.run, self.run.scratch, self.run.queries
        m, _, dv = run.v.shape
        after = scratch("after", m, *R.shape[1:])
        above = scratch("above", m, run.x.shape[1], dv)
        run.load(self.d_out, span, above[:, :queries])
        dU = torch.bmm(run.scores[:, :queries].mT, above[:, :queries])
        dE = scratch("dE", *run.v.shape)
        for j in reversed(range(span.count)):
            at = run.chunk(j)
            after[at].copy_(R)
            dU[at].baddbmm_(run.written[at], R)
            dE[at].copy_(_solve_transposed(run.system[at], dU[at] * run.beta[at]))
            torch.neg(dE[at], out=above[at, queries:])
            if run.keep is not None:
                R.mul_(run.keep[at])
            R.baddbmm_(run.read[at].mT, above[at])
        return dU, dE, above, after

    def _crossing(self, dx: Tensor, dk: Tensor, handed_on: Tensor) -> Tensor:
        """The gradient of log_decay_i: all that crosses i, pairs of a later asker and an earlier key, and the state."""
        run = self.run
        balance = (run.x * dx).view(run.k.shape[0], -1, *run.k.shape[1:]).sum(1).sub_(run.k * dk)
        found = balance.flip(1).cumsum(1).flip(1).add_(handed_on)
        return found.sum(-1, keepdim=True) if type(run.decay) is ScalarDecay else found

    def _write(self, target: Tensor, span: Span, value: Tensor) -> None:
        self.run.folded(target).write(span, self.run.by_lanes(value))


def _solve(system: Tensor, right: Tensor) -> Tensor:
    """(I + tril(system, -1))^-1 right. From the right side: LAPACK is column-major, so that nothing is copied."""
    return torch.linalg.solve_triangular(system.mT, right.mT, upper=True, left=False, unitriangular=True).mT


def _solve_transposed(system: Tensor, right: Tensor) -> Tensor:
    """(I + tril(system, -1))^-T right."""
    return torch.linalg.solve_triangular(system, right.mT, upper=False, left=False, unitriangular=True).mT
