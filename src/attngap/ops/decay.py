"""The three kinds of decay inside one chunk: none, one number a token, one number a token and channel.

All of them answer the same questions. With G_i the running sum of log_decay inside the chunk, and G its total:
`scores` A_ij = sum_c q_ic k_jc exp(G_ic - G_jc) for j <= i; `read` q_i exp(G_i), what a row sees of the state before
the chunk; `write` k_j exp(G - G_j), what a key leaves in the state after it; `kept`, exp(G). No
exponent is ever positive, so nothing overflows however strong the decay is.

Shapes: q (n, group * c, r), the queries of a group of heads after each other; k (n, c, r); log_decay (n, c, 1 or r).
"""

import itertools

import torch
from torch import Tensor

from attngap.ops.chunks import Scratch
from attngap.ops.exponent import weight_exp_


class NoDecay:
    """A = tril(q k^T)."""

    halving = False  # must a chunk's length be a power of two
    kept: Tensor | None = None  # (n, 1 or r, 1): what the chunk leaves of the state before it; None is all of it

    def __init__(self, scratch: Scratch):
        self.scratch = scratch
        self.lower: dict[int, Tensor] = {}

    def begin_chunk(self, log_decay: Tensor | None) -> None:
        """Begin a chunk."""

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        out = self.scratch("scores", q.shape[0], q.shape[1], k.shape[1])
        return self.weigh(torch.bmm(q, k.mT, out=out))

    def add_score_grads(self, grad: Tensor, q: Tensor, k: Tensor, dq: Tensor, dk: Tensor) -> None:
        """From the gradient of the scores, which is overwritten, to those of q and k, added to what is there."""
        grad = self.weigh(grad)
        dq.baddbmm_(grad, k)
        dk.baddbmm_(grad.mT, q)

    def weigh(self, scores: Tensor) -> Tensor:
        c = scores.shape[-1]
        scores.view(-1, c, c).mul_(self.triangle(c, scores))
        return scores

    def triangle(self, c: int, like: Tensor) -> Tensor:
        """(c, c), ones up to the diagonal."""
        if c not in self.lower:
            self.lower[c] = torch.ones(c, c, dtype=like.dtype, device=like.device).tril_()
        return self.lower[c]

    def read(self, q: Tensor, out: Tensor | None = None) -> Tensor:
        return q

    def write(self, k: Tensor, out: Tensor | None = None) -> Tensor:
        return k

    def carry(self, start: Tensor, parts: Tensor, out: Tensor, *, back: bool = False) -> Tensor:
        """x <- kept x + part over the chunks of each lane, or back over them, from start (n, r, w).

        `out` (n, count, r, w) becomes what each chunk begins with; returned is the end.
        """
        order = range(parts.shape[1])[:: -1 if back else 1]
        if len(order) == 1:
            out[:, 0].copy_(start)
        else:
            self._between(start, parts, out, back)
        last, kept = order[-1], self.kept
        if kept is None:
            return torch.add(parts[:, last], out[:, last])
        return torch.addcmul(parts[:, last], out[:, last], kept.view(*parts.shape[:2], -1, 1)[:, last])

    def _between(self, start: Tensor, parts: Tensor, out: Tensor, back: bool) -> None:
        """All states of a lane are one product with a triangle of factors: a call a chunk costs twice as much."""
        flat = parts.flatten(2)
        factors = self._factors(flat)
        edge = factors[:, -1:, 1:].mT if back else factors[:, :-1, :1]  # (n or 1, count, 1)
        inner = factors[:, :-1, 1:]
        inner = (inner.mT if back else inner).expand(len(flat), -1, -1)
        begin = start.reshape(len(flat), 1, -1)
        begin = begin.expand_as(flat) if self.kept is None else edge * begin
        torch.baddbmm(begin, inner, flat, out=out.view_as(flat))

    def _factors(self, parts: Tensor) -> Tensor:
        """(n or 1, count + 1, count + 1): what is left after i chunks of what was there after j <= i."""
        return self.triangle(parts.shape[1] + 1, parts)[None]


class ScalarDecay(NoDecay):
    """A = (q k^T) * exp(G_i - G_j): one triangle of factors a head."""

    pairs: Tensor | None  # (n, c, c), once scores are asked for

    def begin_chunk(self, log_decay: Tensor | None) -> None:
        assert log_decay is not None
        # In float64: the difference of two large sums must keep the small decays between them.
        self.total, self.dtype = log_decay.to(torch.float64).cumsum(1), log_decay.dtype  # (n, c, 1 or r)
        self.from_start = weight_exp_(self.total.to(self.dtype, copy=True))
        self.to_end = weight_exp_((self.total[:, -1:] - self.total).to(self.dtype))
        self.kept = self.from_start[:, -1:].mT
        self.pairs = None

    def weigh(self, scores: Tensor) -> Tensor:
        n, c, _ = self.total.shape
        if self.pairs is None:
            pairs = weight_exp_(self._differences(self.scratch("pairs", n, c, c)))
            self.pairs = pairs.mul_(self.triangle(c, pairs))
        scores.view(n, -1, c, c).mul_(self.pairs[:, None])
        return scores

    def _differences(self, out: Tensor) -> Tensor:
        """G_i - G_j, each G as the sum of two numbers of the shorter type: as exact as the result can be."""
        high = self.total.to(out.dtype)
        torch.sub(high, high.mT, out=out)
        if out.dtype != self.total.dtype:
            low = (self.total - high).to(out.dtype)
            out.add_(low).sub_(low.mT)
        return out

    def read(self, q: Tensor, out: Tensor | None = None) -> Tensor:
        out = self.scratch("read", *q.shape) if out is None else out
        by_head = (-1, self.from_start.shape[1])
        torch.mul(q.unflatten(1, by_head), self.from_start[:, None], out=out.unflatten(1, by_head))
        return out

    def write(self, k: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.mul(k, self.to_end, out=self.scratch("written", *k.shape) if out is None else out)

    def _factors(self, parts: Tensor) -> Tensor:
        n, count, _ = parts.shape
        after = torch.nn.functional.pad(self.total[:, -1].view(n, count).cumsum(1), (1, 0))[
            ..., None
        ]  # (n, count + 1, 1)
        factors = weight_exp_((after - after.mT).to(parts.dtype))
        return factors.mul_(self.triangle(count + 1, factors))


class VectorDecay(ScalarDecay):
    """Every pair j < i is split by exactly one midpoint m of the halvings of the chunk, j <= m < i:

    exp(G_i - G_j) = exp(G_i - G_m) exp(G_m - G_j), both at most 1. So each halving is one product of scaled queries of
    the right halves with scaled keys of the left ones, and the diagonal is q_i . k_i.
    """

    halving = True
    found: list[tuple[int, Tensor, Tensor]] | None

    def begin_chunk(self, log_decay: Tensor | None) -> None:
        super().begin_chunk(log_decay)
        self.found = None

    @property
    def levels(self) -> list[tuple[int, Tensor, Tensor]]:
        """Half, factors of the right queries, of the left keys."""
        if self.found is not None:
            return self.found
        n, c, r = self.total.shape
        self.found, half = [], c // 2
        while half:
            left, right = self.total.view(n, -1, 2, half, r).unbind(2)  # (n, blocks, half, r)
            middle = left[:, :, -1:]
            after, before = (right - middle).to(self.dtype), (middle - left).to(self.dtype)
            self.found.append((half, weight_exp_(after), weight_exp_(before)))
            half //= 2
        return self.found

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        n, c, _ = k.shape
        out = self.scratch("scores", n, q.shape[1], c).zero_()
        for half, on_right, on_left in self.levels:
            blocks = _blocks(out, half)
            blocks.copy_((_right(q, on_right) @ _left(k, on_left).mT).view(blocks.shape))
        pairs = q.unflatten(1, (-1, c)) * k[:, None]
        out.view(n, -1, c, c).diagonal(dim1=-2, dim2=-1).copy_(pairs.sum(-1))
        return out

    def add_score_grads(self, grad: Tensor, q: Tensor, k: Tensor, dq: Tensor, dk: Tensor) -> None:
        n, c, r = k.shape
        diagonal = grad.view(n, -1, c, c).diagonal(dim1=-2, dim2=-1)[..., None]  # (n, group, c, 1)
        dq.view(n, -1, c, r).addcmul_(diagonal, k[:, None])
        dk.add_((diagonal * q.unflatten(1, (-1, c))).sum(1))
        for half, on_right, on_left in self.levels:
            block = _blocks(grad, half).flatten(2, 3)  # (n, blocks, group * half, half)
            right = (block @ _left(k, on_left)).unflatten(2, (-1, half)) * on_right[:, :, None]
            dq.view(n, -1, c // (2 * half), 2, half, r)[:, :, :, 1].add_(right.transpose(1, 2))
            left = block.mT @ _right(q, on_right)
            dk.view(n, -1, 2, half, r)[:, :, 0].add_(left.mul_(on_left))

    def _between(self, start: Tensor, parts: Tensor, out: Tensor, back: bool) -> None:
        assert self.kept is not None
        kept = self.kept.view(*parts.shape[:2], -1, 1)  # (n, count, r, 1)
        order = range(parts.shape[1])[:: -1 if back else 1]
        out[:, order[0]].copy_(start)
        for here, following in itertools.pairwise(order):
            torch.addcmul(parts[:, here], out[:, here], kept[:, here], out=out[:, following])


def _right(q: Tensor, factor: Tensor) -> Tensor:
    """The right halves of q, times factor (n, blocks, half, r), as (n, blocks, group * half, r)."""
    _, blocks, half, _ = factor.shape
    right = q.unflatten(1, (-1, blocks, 2, half))[:, :, :, 1]
    return (right * factor[:, None]).transpose(1, 2).flatten(2, 3)


def _left(k: Tensor, factor: Tensor) -> Tensor:
    _, blocks, half, _ = factor.shape
    return k.unflatten(1, (blocks, 2, half))[:, :, 0] * factor


def _blocks(scores: Tensor, half: int) -> Tensor:
    """The blocks of right rows and left columns, a view (n, blocks, group, half, half) of (n, group * c, c)."""
    n, _, c = scores.shape
    blocks = c // (2 * half)
    cells = scores.view(n, -1, blocks, 2, half, blocks, 2, half)[:, :, :, 1, :, :, 0]
    return cells.diagonal(dim1=2, dim2=4).permute(0, 4, 1, 2, 3)
