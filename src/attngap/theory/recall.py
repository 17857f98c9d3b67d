"""Retrieval laws: how much mass, and how little crosstalk, a state of rank r can bring to its targets."""

import dataclasses
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from attngap.errors import AttngapError


@dataclasses.dataclass(frozen=True)
class Retrieval:
    """What the weights retrieve across each cut, against what a state of rank r can; see `retrieval`."""

    mass: Tensor  # T: sum over distinct targets of the mean weight they receive, (..., cuts)
    targets: Tensor  # N: distinct targets, (cuts,)
    crosstalk: Tensor  # see `crosstalk`, at the cut with most targets, (...)

    def variation(self, rank: int) -> Tensor:
        """R1: mean total variation to any linear head with nonnegative features and rows summing to at most one.

        max over cuts of (T - r) / N: the mean over distinct targets of the mean over their queries. Total variation is
        the largest difference of mass over sets of keys.
        """
        return ((self.mass - rank) / self.targets.clamp(min=1)).clamp(min=0).amax(-1)

    def least_crosstalk(self, rank: int) -> float:
        """R2: N / r - 1, a floor on `crosstalk` for any linear head of that rank, signed or unnormalized."""
        return max(0.0, float(self.targets.max()) / rank - 1)


def retrieval(
    weights: Float[Tensor, "*heads n n"], targets: Sequence[int] | Tensor, *, causal: bool = True
) -> Retrieval:
    """Retrieval laws R1 and R2 for weights that should read `targets[i]` from row i (-1: row i is no query).

    They are docs/theory.md 4.1, 4.2 and 4.3.

    At a cut t the queries are the rows i >= t with a target <= t. Averaging the rows of each target gives a
    target-by-target matrix G. For linear attention of rank r it has rank <= r, so its trace T is at most r when rows
    are nonnegative and sum to at most one. `weights` must be such rows; for signed ones see `crosstalk`.

    >>> copy = torch.zeros(8, 8, dtype=torch.float64)
    >>> copy[range(8), [0, 1, 2, 3, 0, 1, 2, 3]] = 1.0  # rows 4..7 read 0..3
    >>> retrieval(copy, [-1] * 4 + [0, 1, 2, 3]).variation(1).item()
    0.75
    """
    asks = _asks(weights, targets, causal)
    low, high = weights.min().item(), weights.sum(-1).max().item()
    if low < 0 or high > 1 + 1e-5:
        raise AttngapError(
            f"retrieval: weights must be nonnegative with rows summing to at most 1, got a smallest entry of {low:.3g} "
            f"and a largest row sum of {high:.6g}. Normalize them first"
        )
    counts = _across(asks, causal)
    sums = _across(weights.double() * asks, causal)
    return Retrieval(
        mass=(sums / counts.clamp(min=1)).sum(-1),
        targets=(counts > 0).sum(-1),
        crosstalk=crosstalk(weights, targets, causal=causal),
    )


def crosstalk(
    weights: Float[Tensor, "*heads n n"], targets: Sequence[int] | Tensor, *, causal: bool = True
) -> Float[Tensor, "*heads"]:
    """Mean over targets of (sum_{j != i} G_ij^2) / G_ii^2, G the averaged target-by-target matrix of `retrieval`.

    R2: at least N / r - 1 for any G of rank r, because ||G||_F^2 >= tr(G)^2 / r once rows are divided by G_ii. Taken at
    the cut with the most distinct targets; infinite when a target receives nothing.
    """
    asks = _asks(weights, targets, causal)
    counts = _across(asks, causal)
    cut = int((counts > 0).sum(-1).argmax())
    present = counts[cut] > 0
    if not present.any():
        raise AttngapError("crosstalk: no row is a query; give a target other than -1 to at least one row")
    average = (asks[cut:] / counts[cut].clamp(min=1))[:, present].mT  # (targets, queries)
    grid = (average @ weights.double()[..., cut:, :])[..., present]
    signal = grid.diagonal(dim1=-2, dim2=-1).square()
    return ((grid.square().sum(-1) - signal) / signal).mean(-1)


def _asks(weights: Tensor, targets: Sequence[int] | Tensor, causal: bool) -> Float[Tensor, "n n"]:
    """[i, j]: does row i ask for key j."""
    n = weights.shape[-1]
    if not weights.isfinite().all():
        raise AttngapError(f"retrieval: weights must be finite, got {int((~weights.isfinite()).sum())} that are not")
    index = torch.as_tensor(targets, device=weights.device)
    rows = torch.arange(n, device=weights.device)
    if index.shape != (n,):
        raise AttngapError(f"retrieval: targets needs one entry per row, {n}, got shape {tuple(index.shape)}")
    late = index > (rows if causal else n - 1)
    if bool((late | (index < -1)).any()):
        row = int((late | (index < -1)).nonzero()[0])
        limit = "its row's index" if causal else f"{n - 1}"
        raise AttngapError(f"retrieval: a target must be -1 (no query) to {limit}, got {int(index[row])} for row {row}")
    return (index[:, None] == rows).double()


def _across(x: Float[Tensor, "*heads n n"], causal: bool) -> Float[Tensor, "*heads cuts n"]:
    """[t, j]: sum over the rows at or after t, kept for keys at or before t. Bidirectional: one cut, all rows."""
    if not causal:
        return x.sum(-2, keepdim=True)
    return x.flip(-2).cumsum(-2).flip(-2).tril()
