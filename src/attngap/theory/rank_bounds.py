"""Rank floor and ceiling: the least error of any linear attention with a state of rank r, from both sides."""

import dataclasses
import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from attngap.errors import AttngapError
from attngap.theory import blocks

FLOOR_CELLS = (6, 4)
HEADS_AT_ONCE = 8  # heads that one sweep takes: enough to hide the cost of a call, few enough to bound memory


@dataclasses.dataclass(frozen=True)
class Error:
    """A squared Frobenius error per head: `value` has the heads' shape, then an axis of ranks if several were asked."""

    value: Tensor
    far: Tensor  # squared norm of what window and sinks leave over, in the heads' shape
    whole: Tensor  # squared norm of all the weights
    ranks: tuple[int, ...]

    @property
    def relative(self) -> Tensor:
        """Share of the far part's squared norm; zero where nothing is left over."""
        return _share(self.value, self.far)

    @property
    def of_whole(self) -> Tensor:
        """Share of the whole matrix's squared norm."""
        return _share(self.value, self.whole)


@dataclasses.dataclass(frozen=True)
class Floor(Error):
    """No linear attention of that rank comes nearer. `cuts` of `possible` cut positions were tried."""

    cuts: int
    possible: int

    @property
    def exact(self) -> bool:
        return self.cuts == self.possible


@dataclasses.dataclass(frozen=True)
class Ceiling(Error):
    """A linear attention of that rank this near exists: `weights`, `(..., n, n)`, or `(..., ranks, n, n)` for several.

    Window and sinks are kept exact in it. Its rows need not sum to one and its entries may be negative.
    `stride` is the number of tokens between truncations, one per rank: 1 is the finest.
    """

    stride: tuple[int, ...]
    weights: Tensor | None


def floor(
    weights: Float[Tensor, "*heads n n"],
    rank: int | Sequence[int],
    window: int = 0,
    sinks: int = 0,
    *,
    causal: bool = True,
    cells: int | Sequence[int] = FLOOR_CELLS,
) -> Floor:
    """Certified lower bound on ||A - W||_F^2 over all W computable with a state of that rank (docs/theory.md 3.2).

    Causal: tails of disjoint blocks A[t:hi, lo:t+1], the best choice among a thinned set of cuts (`cells` per level of
    the recursion; `cells=n` tries every cut, at n^3/6 factorizations). Fewer cuts give a smaller floor, never a wrong
    one. The last `window` keys (the row's own included) and the first `sinks` may be exact in W.
    Bidirectional: Eckart-Young, window and sinks do not apply. Rounding is taken off, see `blocks.tails`.

    >>> floor(torch.eye(8, dtype=torch.float64), 1).value.item()  # a head that reads its own token
    0.0
    """
    flat, ranks = _checked(weights, rank, window, sinks, causal, "floor")
    levels = (cells,) if isinstance(cells, int) else tuple(cells)
    if min(levels) < 2:
        raise AttngapError(f"floor: cells must be at least 2 at every level, got {cells}")
    values, far, whole = [], [], []
    cuts = possible = 0
    for head in flat.split(1):  # one at a time keeps the blocks in cache and the memory flat
        head = head.double()
        part = _far(head, window, sinks) if causal else head
        possible = part.shape[-1] if causal else 0
        if causal:
            value, tried = blocks.recursion(part, ranks, levels)
            cuts = len(tried)
        else:
            value = blocks.tails(part, ranks)
        values.append(value)
        far.append(part.square().sum((-2, -1)))
        whole.append(head.square().sum((-2, -1)))
    lead = weights.shape[:-2]
    return Floor(
        value=_shaped(torch.cat(values), lead, rank),
        far=torch.cat(far).reshape(lead),
        whole=torch.cat(whole).reshape(lead),
        ranks=ranks,
        cuts=cuts,
        possible=possible,
    )


def weighted_floor(
    weights: Float[Tensor, "*heads n n"],
    rows: Float[Tensor, "*heads n"],
    columns: Float[Tensor, "*heads n"],
    rank: int | Sequence[int],
    window: int = 0,
    sinks: int = 0,
    *,
    causal: bool = True,
    cells: int | Sequence[int] = FLOOR_CELLS,
) -> Floor:
    """Certified lower bound on the sum of rows_i^2 columns_j^2 (A_ij - W_ij)^2 over the same W (docs/theory.md 3.7).

    Scaling rows and columns keeps the rank of every block, so it is the floor of diag(rows) A diag(columns). Weights of
    pairs that are no such product give no bound (6.7), and none of this bounds what the model loses (6.8).

    >>> eye = torch.eye(4, dtype=torch.float64).flip(0).tril()
    >>> weighted_floor(eye, torch.zeros(4), torch.ones(4), 1).value.item()  # rows that nothing reads
    0.0
    """
    for name, scale in (("rows", rows), ("columns", columns)):
        if not scale.isfinite().all() or (scale < 0).any():
            raise AttngapError(f"weighted_floor: {name} must be finite and not negative, got {scale.min():g} or worse")
    # The two roundings of an entry are within what `blocks.tails` takes off: it counts a unit roundoff twice.
    scaled = rows.double()[..., :, None] * weights.double() * columns.double()[..., None, :]
    return floor(scaled, rank, window, sinks, causal=causal, cells=cells)


def ceiling(
    weights: Float[Tensor, "*heads n n"],
    rank: int | Sequence[int],
    window: int = 0,
    sinks: int = 0,
    *,
    causal: bool = True,
    stride: int | None = None,
    matrix: bool = True,
) -> Ceiling:
    """Build a W of that rank and measure it: the best possible lies between `floor` and this (docs/theory.md 3.4).

    `stride` tokens lie between truncations; None means rank // 8, at least 1. Stride 1 is the most accurate and costs
    about 8 times more at rank 64. `matrix=False` drops W to save memory.

    >>> mean = torch.ones(6, 6, dtype=torch.float64).tril() / torch.arange(1, 7)[:, None]
    >>> ceiling(mean, 1).value.item() < 1e-12  # the running mean has full rank and needs one number of state
    True
    """
    flat, ranks = _checked(weights, rank, window, sinks, causal, "ceiling")
    strides = tuple(max(1, r // 8) if stride is None else stride for r in ranks)
    if not all(1 <= s <= r for s, r in zip(strides, ranks, strict=True)):
        raise AttngapError(f"ceiling: stride must be 1 to the rank ({min(ranks)}), got {stride}")
    heads, n = flat.shape[0], flat.shape[-1]
    values = flat.new_zeros(heads, len(ranks), dtype=torch.float64)
    built = flat.new_zeros(heads, len(ranks), n, n, dtype=torch.float64) if matrix else None
    far, whole = values.new_zeros(heads), values.new_zeros(heads)
    for some in torch.arange(heads).split(HEADS_AT_ONCE):
        full = flat[some].double()
        part = _far(full, window, sinks) if causal else full
        far[some], whole[some] = part.square().sum((-2, -1)), full.square().sum((-2, -1))
        for j, (r, s) in enumerate(zip(ranks, strides, strict=True)):
            change = (blocks.sweep(part, r, s) if causal else _truncated(part, r)) - part
            values[some, j] = change.square().sum((-2, -1))
            if built is not None:
                built[some, j] = full
                built[some, j, n - part.shape[1] :, sinks : sinks + part.shape[2]] += change
    lead = weights.shape[:-2]
    if built is not None:
        built = built.reshape(*lead, n, n) if isinstance(rank, int) else built.reshape(*lead, len(ranks), n, n)
    return Ceiling(
        value=_shaped(values, lead, rank),
        far=far.reshape(lead),
        whole=whole.reshape(lead),
        ranks=ranks,
        stride=strides,
        weights=built,
    )


def _far(weights: Tensor, window: int, sinks: int) -> Tensor:
    """The inclusive triangle that an exact `window` and exact `sinks` leave over (docs/theory.md 3.5)."""
    n = weights.shape[-1]
    return weights[:, sinks + window :, sinks : max(sinks, n - window)].tril()


def _truncated(matrix: Tensor, rank: int) -> Tensor:
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    return (left[..., :rank] * values[..., None, :rank]) @ right[..., :rank, :]


def _checked(
    weights: Tensor, rank: int | Sequence[int], window: int, sinks: int, causal: bool, who: str
) -> tuple[Tensor, tuple[int, ...]]:
    n = weights.shape[-1]
    ranks = (rank,) if isinstance(rank, int) else tuple(rank)
    if not ranks or not all(1 <= r <= n for r in ranks):
        raise AttngapError(f"{who}: rank must be 1 to {n}, the number of tokens, got {rank}")
    if window < 0 or sinks < 0:
        raise AttngapError(f"{who}: window and sinks must not be negative, got window={window}, sinks={sinks}")
    if not causal and (window or sinks):
        raise AttngapError(f"{who}: window and sinks need causal=True, got window={window}, sinks={sinks}")
    if not weights.isfinite().all():
        raise AttngapError(f"{who}: weights must be finite, got {int((~weights.isfinite()).sum())} that are not")
    if causal and weights.triu(1).any():
        raise AttngapError(f"{who}: causal weights must be zero above the diagonal, got others. Pass causal=False")
    return weights.reshape(math.prod(weights.shape[:-2]), n, n), ranks


def _share(value: Tensor, of: Tensor) -> Tensor:
    of = of[..., None] if value.ndim > of.ndim else of
    return torch.where(of > 0, value / of.clamp(min=torch.finfo(torch.float64).tiny), 0.0)


def _shaped(values: Tensor, lead: torch.Size, rank: int | Sequence[int]) -> Tensor:
    return values.reshape(lead) if isinstance(rank, int) else values.reshape(*lead, values.shape[-1])
