"""Low rank below the diagonal: what every linear attention obeys, as blocks, a lower bound and a construction.

A state of rank r forces rank W[t:, :t+1] <= r for every t. `recursion` bounds the distance of a lower-triangular matrix
to that set from below, `sweep` builds a member of it. Both work on `(heads, n, n)` in float64.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

EPS = torch.finfo(torch.float64).eps


def tails(block: Float[Tensor, "heads rows cols"], ranks: Sequence[int]) -> Float[Tensor, "heads ranks"]:
    """Sum of squared singular values beyond the r largest, for each r, never overstated.

    tail_r(B) = ||B||_F^2 - (r largest eigenvalues of the smaller Gram matrix), all of them computed: a truncated SVD
    would understate the head. Forming the Gram matrix moves it by at most (inner) eps ||B||_F^2, the symmetric
    eigensolver by at most (size) eps ||B||_F^2 (Weyl), so r + 1 times their sum is taken off.
    """
    rows, cols = block.shape[1:]
    size, inner = min(rows, cols), max(rows, cols)
    gram = block @ block.mT if rows <= cols else block.mT @ block
    total = block.square().sum((-2, -1))
    head = torch.linalg.eigvalsh(gram).flip(-1).cumsum(-1)  # head[r-1]: the r largest together
    out = block.new_zeros(block.shape[0], len(ranks))
    for column, rank in enumerate(ranks):
        if rank < size:
            rounding = (rank + 1) * (inner + size) * EPS * total
            out[:, column] = (total - head[:, rank - 1] - rounding).clamp(min=0.0)
    return out


def cut_points(lo: int, hi: int, cells: int) -> list[int]:
    """`cells` nearly equal cells of lo..hi-1, as the cuts between them and a sentinel at each end.

    A cut t owns index t: cell i is the triangle on points[i]+1 .. points[i+1]-1.
    """
    cells = cells if cells < hi - lo else hi - lo + 1  # every index is a cut
    return [lo - 1, *(lo - 1 + (hi - lo + 1) * i // cells for i in range(1, cells)), hi]


def recursion(
    matrix: Float[Tensor, "heads n n"], ranks: Sequence[int], cells: Sequence[int]
) -> tuple[Float[Tensor, "heads ranks"], set[int]]:
    """f(lo, hi) = max over t of tail_r(A[t:hi, lo:t+1]) + f(lo, t) + f(t+1, hi), and the cuts t that were tried.

    The rectangles of one solution are disjoint and each lies in one block A[t:, :t+1], so their tails add up to a lower
    bound for any set of cuts. `cells` thins that set: the triangle is cut into cells[0] cells, each of those into
    cells[1], and so on, the last entry for all deeper levels. Within a level every choice of cuts is tried.
    """
    tried: set[int] = set()
    return _triangle(matrix, 0, matrix.shape[-1], ranks, cells, tried), tried


def _triangle(
    matrix: Tensor, lo: int, hi: int, ranks: Sequence[int], cells: Sequence[int], tried: set[int]
) -> Float[Tensor, "heads ranks"]:
    nothing = matrix.new_zeros(matrix.shape[0], len(ranks))
    if hi - lo + 1 <= 2 * min(ranks):  # the largest rectangle has a side of at most the rank
        return nothing
    points = cut_points(lo, hi, cells[0])
    last = len(points) - 1
    tried.update(points[1:-1])
    deeper = cells[1:] or cells
    best = {(i, i + 1): _triangle(matrix, points[i] + 1, points[i + 1], ranks, deeper, tried) for i in range(last)}
    for width in range(2, last + 1):
        for i in range(last - width + 1):
            j = i + width
            best[i, j] = nothing
            for k in range(i + 1, j):
                rows, cols = points[j] - points[k], points[k] - points[i]
                value = best[i, k] + best[k, j]
                if min(rows, cols) > min(ranks):
                    block = matrix[:, points[k] : points[j], points[i] + 1 : points[k] + 1]
                    value = value + tails(block, ranks)
                best[i, j] = torch.maximum(best[i, j], value)
    return best[0, last]


def sweep(matrix: Float[Tensor, "heads n n"], rank: int, stride: int = 1) -> Float[Tensor, "heads n n"]:
    """A lower-triangular W near `matrix` with rank W[t:, :t+1] <= rank for every t.

    Keeps W[t:, :t+1] = F C, F `(n - t, s)` and C `(s, t + 1)` with orthonormal rows. Each token adds a column to F and
    a unit row to C; keeping the leading right singular directions V of F turns F into F V and C into V^T C. That is a
    step S <- M S + k v^T of a linear attention whose state is C, read by the rows of F: the state theorem makes W
    valid whatever V is, the choice of V makes it close.

    With stride 1 the squared error is at most sum_t tail_r(A[t:, :t+1]). A larger stride truncates to
    rank - stride + 1 once every `stride` tokens and lets the state fill up in between: still valid for every t, fewer
    factorizations, a larger error.
    """
    heads, n, _ = matrix.shape
    keep, width = rank - stride + 1, 0
    out = matrix.new_zeros(matrix.shape)
    future = matrix.new_zeros(heads, n, rank + 1)  # F: rows `start:`, columns `:width`
    state = matrix.new_zeros(heads, rank + 1, n)  # C: rows `:width`, zero beyond the columns seen
    for start in range(0, n, stride):
        stop = min(start + stride, n)
        future[:, start:, width] = matrix[:, start:, start]
        state[:, width, start] = 1.0
        width += 1
        if width > keep:
            whole = future[:, start:, :width]
            directions = torch.linalg.eigh(whole.mT @ whole).eigenvectors[..., -keep:]
            future[:, start:, :keep] = whole @ directions
            state[:, :keep, :stop] = directions.mT @ state[:, :width, :stop]
            state[:, keep:width] = 0.0
            width = keep
        out[:, start:stop, :stop] = future[:, start:stop, :width] @ state[:, :width, :stop]
        out[:, start:stop, start + 1 : stop] = matrix[:, start:stop, start + 1 : stop].tril(-1)
        fresh = stop - start - 1
        future[:, stop:, width : width + fresh] = matrix[:, stop:, start + 1 : stop]
        state[:, range(width, width + fresh), range(start + 1, stop)] = 1.0
        width += fresh
    return out
