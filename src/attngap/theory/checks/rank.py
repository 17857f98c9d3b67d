"""Checks of the state theorem, of floor and ceiling, and of the retrieval laws."""

import math

import torch
from torch import Tensor

from attngap.theory.capacity import capacity, recall
from attngap.theory.rank_bounds import ceiling, floor, weighted_floor
from attngap.theory.recall import crosstalk, retrieval
from attngap.theory.recurrences import RECURRENCES, causal_softmax, recurrent_weights
from attngap.theory.statements import Statement, require

N = 24


def largest_rank(weights: Tensor) -> int:
    """The largest numerical rank of any inclusive block W[t:, :t+1]."""
    n = weights.shape[-1]
    return max(int(torch.linalg.matrix_rank(weights[t:, : t + 1], rtol=1e-9)) for t in range(n))


def state_theorem() -> str:
    shown = []
    for name, (bound, make) in RECURRENCES.items():
        rank = max(largest_rank(make(N, 3, torch.Generator().manual_seed(seed))) for seed in range(3))
        require(rank == bound(3), f"{name}: rank {rank}, claimed {bound(3)}")
        shown.append(f"{name} {rank}")
    return "rank of every block at r = 3: " + ", ".join(shown)


def floor_is_a_floor() -> str:
    generator = torch.Generator().manual_seed(1)
    target = causal_softmax(N, 3.0, generator)
    bound = floor(target, 3, cells=N).value.item()
    nearest = math.inf
    for name, (rank, make) in RECURRENCES.items():
        if rank(3) > 3:
            continue
        made = make(N, 3, generator)
        row_scale = (made * target).sum(-1, keepdim=True) / made.square().sum(-1, keepdim=True).clamp(min=1e-30)
        error = (target - row_scale * made).square().sum().item()
        require(error >= bound, f"{name} has error {error}, below the floor {bound}")
        nearest = min(nearest, error)
    built = ceiling(target, 3, stride=1)
    require(built.value.item() >= bound, "the ceiling lies below the floor")
    return f"floor {bound:.3f} <= built {built.value.item():.3f} <= best of the random recurrences {nearest:.3f}"


def recursion_dominates() -> str:
    target = causal_softmax(32, 3.0, torch.Generator().manual_seed(2))
    single, dyadic, full = (floor(target, 2, cells=cells).value.item() for cells in ((2, 33), (2,), (32,)))
    one_cut = max(torch.linalg.svdvals(target[t:, : t + 1])[2:].square().sum().item() for t in range(32))
    require(full >= max(dyadic, one_cut) - 1e-9, f"full {full}, dyadic {dyadic}, one cut {one_cut}")
    return f"all cuts {full:.3f} >= halving {dyadic:.3f}, best single cut {one_cut:.3f}, middle cut first {single:.3f}"


def ceiling_is_valid() -> str:
    generator = torch.Generator().manual_seed(3)
    for rank, stride in ((1, 1), (3, 1), (4, 2), (8, 3)):
        target = causal_softmax(N, 3.0, generator)
        built = ceiling(target, rank, stride=stride)
        assert built.weights is not None
        require(largest_rank(built.weights) <= rank, f"rank {rank}, stride {stride}: a block has a higher rank")
        tails = sum(torch.linalg.svdvals(target[t:, : t + 1])[rank:].square().sum().item() for t in range(N))
        require(stride > 1 or built.value.item() <= tails + 1e-9, f"error {built.value.item()} above {tails}")
    return f"every block of n = {N} has rank <= r at four (rank, stride); error at most the sum of the tails"


def window_and_sinks() -> str:
    target = causal_softmax(N, 3.0, torch.Generator().manual_seed(4))
    built = ceiling(target, 2, window=5, sinks=3, stride=1)
    assert built.weights is not None
    row, key = torch.meshgrid(torch.arange(N), torch.arange(N), indexing="ij")
    near = (row - key < 5) | (key < 3)
    require(torch.equal(built.weights[near], target[near]), "near keys are not exact")
    require(floor(target, 2, window=5, sinks=3).value.item() <= built.value.item(), "floor above ceiling")
    far = target.masked_fill(near, 0.0).square().sum().item()
    require(abs(far - built.far.item()) < 1e-12, f"far part {built.far.item()}, expected {far}")
    return "near keys exact, the rest is the inclusive triangle of A[g+w:, g:n-w]"


def bidirectional_is_tight() -> str:
    target = torch.randn(N, N, generator=torch.Generator().manual_seed(7), dtype=torch.float64).softmax(-1)
    low, high = (bound(target, 3, causal=False).value.item() for bound in (floor, ceiling))
    tail = torch.linalg.svdvals(target)[3:].square().sum().item()
    require(low <= tail * (1 + 1e-9) and abs(high - tail) < 1e-9, f"floor {low}, tail {tail}, ceiling {high}")
    require(tail - low < 1e-9, f"floor {low} is {tail - low} below the tail")
    return f"floor {low:.6f} = tail = ceiling {high:.6f}"


def weighted_floor_is_a_floor() -> str:
    """The best row scaling of a recurrence does not depend on the weights of rows, but does on those of columns."""
    generator = torch.Generator().manual_seed(9)
    target = causal_softmax(N, 3.0, generator)
    rows, columns = (torch.rand(N, generator=generator, dtype=torch.float64).square() for _ in range(2))
    bound = weighted_floor(target, rows, columns, 3, cells=N).value.item()
    nearest = math.inf
    for name, (rank, make) in RECURRENCES.items():
        if rank(3) > 3:
            continue
        made = make(N, 3, generator)
        read, wanted = made * columns, target * columns
        row_scale = (read * wanted).sum(-1, keepdim=True) / read.square().sum(-1, keepdim=True).clamp(min=1e-30)
        error = (rows[:, None] * (wanted - row_scale * read)).square().sum().item()
        require(error >= bound, f"{name} has error {error}, below the weighted floor {bound}")
        nearest = min(nearest, error)
    built = ceiling(rows[:, None] * target * columns, 3, stride=1).value.item()
    require(0 < bound <= built, f"weighted floor {bound}, weights of that rank reach {built}")
    return f"weighted floor {bound:.4f} <= built {built:.4f} <= best of the random recurrences {nearest:.4f}"


def first_retrieval_law() -> str:
    generator = torch.Generator().manual_seed(5)
    half = 12
    targets = torch.cat([torch.full((half,), -1), torch.randperm(half, generator=generator)])
    worst = 0.0
    for _ in range(20):
        made = recurrent_weights(2 * half, 3, generator, positive=True)
        made = made / made.sum(-1, keepdim=True)
        worst = max(worst, retrieval(made, targets).mass.max().item())
    require(worst <= 3, f"positive features of rank 3 reached T = {worst}")
    tight = torch.zeros(2 * half, 2 * half, dtype=torch.float64)
    tight[range(half), range(half)] = 1.0
    groups = targets[half:] // 4 * 4  # each group of four answers with its first member
    tight[range(half, 2 * half), groups] = 1.0
    reached = retrieval(tight, targets).mass.max().item()
    rank = int(torch.linalg.matrix_rank(tight[half:, :half]))
    require(reached == rank == 3, f"tight case: T = {reached}, rank {rank}")
    return f"T <= 3 for 20 random positive heads of rank 3 (largest {worst:.2f}); one of rank 3 attains T = 3"


def variation_law() -> str:
    generator = torch.Generator().manual_seed(8)
    half, rank = 12, 3
    targets = torch.cat([torch.full((half,), -1), torch.randperm(half, generator=generator)])
    sharp = torch.full((2 * half, 2 * half), 0.0, dtype=torch.float64)
    sharp[range(half), range(half)] = 1.0
    sharp[range(half, 2 * half), targets[half:]] = 1.0
    bound = retrieval(sharp, targets).variation(rank).item()
    nearest = math.inf
    for _ in range(20):
        made = recurrent_weights(2 * half, rank, generator, positive=True)
        made = made / made.sum(-1, keepdim=True)
        distance = 0.5 * (sharp - made)[half:].abs().sum(-1).mean().item()
        nearest = min(nearest, distance)
    require(0 < bound <= nearest, f"bound {bound}, a head of rank {rank} comes to {nearest}")
    return f"perfect recall of {half}: at least {bound:.2f} at rank {rank}; nearest of 20 heads {nearest:.2f}"


def second_retrieval_law() -> str:
    generator = torch.Generator().manual_seed(6)
    smallest = math.inf
    targets = [-1] * 12 + list(range(12))
    for _ in range(20):
        left, right = (torch.randn(12, 4, generator=generator, dtype=torch.float64) for _ in range(2))
        weights = torch.zeros(24, 24, dtype=torch.float64)
        weights[12:, :12] = left @ right.mT
        smallest = min(smallest, crosstalk(weights, targets).item())
    require(smallest >= 12 / 4 - 1, f"crosstalk {smallest} below 2")
    repeated = torch.eye(4, dtype=torch.float64).repeat(3, 1)  # each feature answers for three targets
    weights = torch.zeros(24, 24, dtype=torch.float64)
    weights[12:, :12] = repeated @ repeated.mT
    tight = crosstalk(weights, targets).item()
    require(tight == 2.0, f"repeated features have crosstalk {tight}")
    return f"N = 12, r = 4: at least 2; least of 20 random heads {smallest:.1f}, repeated features attain {tight:g}"


def capacity_law() -> str:
    law = capacity(64, 64, 1000)
    quarter, half = (recall(law, round(load * law.half), trials=4).value for load in (0.25, 1.0))
    require(quarter > 0.95 and 0.4 < half < 0.7, f"recall {quarter} at a quarter, {half} at r d_v / (2 ln V)")
    return (
        f"r = d_v = 64, V = 1000: recall {quarter:.2f} at a quarter of {law.half:.0f}, {half:.2f} there (empirical law)"
    )


RANK = (
    Statement("3.1", "every block W[t:, :t+1] of a linear attention has rank at most that of its state", state_theorem),
    Statement("3.2", "no linear attention comes below the floor", floor_is_a_floor),
    Statement("3.3", "the recursion over cuts dominates one cut and halving", recursion_dominates),
    Statement("3.4", "the sweep builds a valid matrix whose error is at most the sum of the tails", ceiling_is_valid),
    Statement("3.5", "window and sinks leave an inclusive triangle", window_and_sinks),
    Statement("3.6", "for bidirectional attention floor and ceiling meet: Eckart-Young", bidirectional_is_tight),
    Statement("3.7", "a floor whose rows and columns are weighted is still a floor", weighted_floor_is_a_floor),
    Statement(
        "4.1",
        "R1: nonnegative weights of rank r bring a total mean mass of at most r to their targets",
        first_retrieval_law,
    ),
    Statement("4.2", "R1 bounds the total variation between softmax and any such head", variation_law),
    Statement("4.3", "R2: signed features of rank r have mean crosstalk of at least N/r - 1", second_retrieval_law),
    Statement("4.4", "argmax recall is about half right at r d_v / (2 ln V) pairs", capacity_law),
)
