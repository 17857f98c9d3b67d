"""The three kinds of decay inside one chunk: none, one number a token, one number a token and channel.

All of them answer the same questions. With G_i the running sum of log_decay inside the chunk, and G its total:
`scores` A_ij = sum_c q_ic k_jc exp(G_ic - G_jc) for j <= i; `read` q_i exp(G_i), what a row sees of the state before
the chunk; `write` k_j exp(G - G_j), what a key leaves in the state after it; `kept`, exp(G). No
exponent is ever positive, so nothing overflows however strong the decay is.

Shapes: q (n, group * c, r), the queries of a group of heads after each other; k (n, c, r); log_decay (n, c, 1 or r).
"""

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

    def enter(self, log_decay: Tensor | None) -> None:
        """Begin a chunk."""

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        out = self.scratch("scores", q.shape[0], q.shape[1], k.shape[1])
        return self.weigh(torch.bmm(q, k.mT, out=out))

    def score_grads(self, grad: Tensor, q: Tensor, k: Tensor, dq: Tensor, dk: Tensor) -> None:
        """From the gradient of the scores, which is overwritten, to those of q and k."""
        grad = self.weigh(grad)
        torch.bmm(grad, k, out=dq)
        torch.bmm(grad.mT, q, out=dk)

    def weigh(self, scores: Tensor) -> Tensor:
        c = scores.shape[-1]
        scores.view(-1, c, c).mul_(self.triangle(scores))
        return scores

    def triangle(self, like: Tensor) -> Tensor:
        """(c, c), ones up to the diagonal."""
        c = like.shape[-1]
        if c not in self.lower:
            self.lower[c] = torch.ones(c, c, dtype=like.dtype, device=like.device).tril_()
        return self.lower[c]

    def read(self, q: Tensor) -> Tensor:
        return q

    def write(self, k: Tensor) -> Tensor:
        return k


class ScalarDecay(NoDecay):
    """A = (q k^T) * exp(G_i - G_j): one triangle of factors a head."""

    def enter(self, log_decay: Tensor | None) -> None:
        total, dtype = self.begin(log_decay)
        between = weight_exp_((total - total.mT).to(dtype))  # (n, c, c)
        self.between = between.mul_(self.triangle(between))

    def begin(self, log_decay: Tensor | None) -> tuple[Tensor, torch.dtype]:
        assert log_decay is not None
        # In float64: the difference of two large sums must keep the small decays between them.
        total, dtype = log_decay.to(torch.float64).cumsum(1), log_decay.dtype
        self.from_start = weight_exp_(total.to(dtype, copy=True))
        self.to_end = weight_exp_((total[:, -1:] - total).to(dtype))
        self.kept = self.from_start[:, -1:].mT
        return total, dtype

    def weigh(self, scores: Tensor) -> Tensor:
        n, c, _ = self.between.shape
        scores.view(n, -1, c, c).mul_(self.between[:, None])
        return scores

    def read(self, q: Tensor) -> Tensor:
        n, c, _ = self.from_start.shape
        return (q.view(n, -1, c, q.shape[-1]) * self.from_start[:, None]).view(q.shape)

    def write(self, k: Tensor) -> Tensor:
        return k * self.to_end


class VectorDecay(ScalarDecay):
    """Every pair j < i is split by exactly one midpoint m of the halvings of the chunk, j <= m < i:

    exp(G_i - G_j) = exp(G_i - G_m) exp(G_m - G_j), both at most 1. So each halving is one product of scaled queries of
    the right halves with scaled keys of the left ones, and the diagonal is q_i . k_i.
    """

    halving = True

    def enter(self, log_decay: Tensor | None) -> None:
        total, dtype = self.begin(log_decay)
        n, c, r = total.shape
        self.levels: list[tuple[int, Tensor, Tensor]] = []  # half, factors of the right queries, of the left keys
        half = c // 2
        while half:
            left, right = total.view(n, -1, 2, half, r).unbind(2)  # (n, blocks, half, r)
            middle = left[:, :, -1:]
            on_right, on_left = weight_exp_((right - middle).to(dtype)), weight_exp_((middle - left).to(dtype))
            self.levels.append((half, on_right, on_left))
            half //= 2

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        n, c, r = k.shape
        out = self.scratch("scores", n, q.shape[1], c).zero_()
        for half, on_right, on_left in self.levels:
            blocks = _blocks(out, half)
            blocks.copy_((_right(q, on_right) @ _left(k, on_left).mT).view(blocks.shape))
        pairs = q.view(n, -1, c, r) * k[:, None]
        out.view(n, -1, c, c).diagonal(dim1=-2, dim2=-1).copy_(pairs.sum(-1))
        return out

    def score_grads(self, grad: Tensor, q: Tensor, k: Tensor, dq: Tensor, dk: Tensor) -> None:
        n, c, r = k.shape
        diagonal = grad.view(n, -1, c, c).diagonal(dim1=-2, dim2=-1)[..., None]  # (n, group, c, 1)
        dq.view(n, -1, c, r).copy_(diagonal * k[:, None])
        torch.sum(diagonal * q.view(n, -1, c, r), 1, out=dk)
        for half, on_right, on_left in self.levels:
            block = _blocks(grad, half).flatten(2, 3)  # (n, blocks, group * half, half)
            right = (block @ _left(k, on_left)).unflatten(2, (-1, half)) * on_right[:, :, None]
            dq.view(n, -1, c // (2 * half), 2, half, r)[:, :, :, 1].add_(right.transpose(1, 2))
            left = block.mT @ _right(q, on_right)
            dk.view(n, -1, 2, half, r)[:, :, 0].add_(left.mul_(on_left))


def _right(q: Tensor, factor: Tensor) -> Tensor:
    """The right halves of q, times factor (n, blocks, half, r), as (n, blocks, group * half, r)."""
    n, blocks, half, r = factor.shape
    right = q.view(n, -1, blocks, 2, half, r)[:, :, :, 1]
    return (right * factor[:, None]).transpose(1, 2).flatten(2, 3)


def _left(k: Tensor, factor: Tensor) -> Tensor:
    n, blocks, half, r = factor.shape
    return k.view(n, blocks, 2, half, r)[:, :, 0] * factor


def _blocks(scores: Tensor, half: int) -> Tensor:
    """The blocks of right rows and left columns, a view (n, blocks, group, half, half) of (n, group * c, c)."""
    n, _, c = scores.shape
    blocks = c // (2 * half)
    cells = scores.view(n, -1, blocks, 2, half, blocks, 2, half)[:, :, :, 1, :, :, 0]
    return cells.diagonal(dim1=2, dim2=4).permute(0, 4, 1, 2, 3)
