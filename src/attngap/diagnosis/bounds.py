"""Floor and ceiling of every head of a layer, and what the ceiling's weights would do to the head's output."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from attngap.engine import run
from attngap.errors import AttngapError
from attngap.theory.certificates import ceiling, floor, weighted_floor

# Cuts of the floor's recursion: a third of the default's time, and the same floor but for the third digit.
CELLS = (4, 2)
PARALLEL_FROM = 256  # tokens from which on it pays to start processes


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Of one layer or head on one sequence. Shares of the squared norm of what window and sinks leave over (`far`)."""

    floor: Float[Tensor, "*h ranks"]
    ceiling: Float[Tensor, "*h ranks"]
    far: Float[Tensor, "*h"]  # share of the whole matrix's squared norm that is far
    spectrum: Float[Tensor, "*h r"]  # singular values of the mid-sequence block, largest first
    change: Float[Tensor, "*h ranks t dv"]  # of the output under the ceiling's weights
    cuts: int
    possible: int


TENSORS = ("floor", "ceiling", "far", "spectrum", "change")


def bounds(
    weights: Float[Tensor, "h t t"],
    values: Float[Tensor, "h t dv"],
    ranks: Sequence[int],
    *,
    window: int,
    sinks: int,
    causal: bool,
) -> Bounds:
    """Certificates of each head, one process per head: many small steps, at which threads wait for each other."""
    near = (window, sinks) if causal else (0, 0)
    task = functools.partial(_of_head, ranks=_possible(ranks, weights), near=near, causal=causal)
    ordered = _each_head(task, _by_head(weights, values))
    stacked = {name: torch.stack([getattr(one, name) for one in ordered]) for name in TENSORS}
    return Bounds(**stacked, cuts=ordered[0].cuts, possible=ordered[0].possible)


def weighted_floors(
    weights: Float[Tensor, "h t t"],
    gradients: Float[Tensor, "h t"],
    values: Float[Tensor, "h t dv"],
    ranks: Sequence[int],
    *,
    window: int,
    sinks: int,
    causal: bool,
) -> Float[Tensor, "h ranks"]:
    """Floors in which errors count by what the model reads: the size of its gradient at the row, of the key's value.

    `gradients` are root mean squares of |g_i|, g_i the gradient of the labels' log-probability at row i of the head's
    output. Half the weighted squared error per row: the damage to second order if g_i lay along all errors of its row
    and those of its keys were orthogonal. Certified as a bound on the error in this metric, not on damage
    (docs/theory.md 3.7, 6.8).
    """
    near = (window, sinks) if causal else (0, 0)
    lengths = (values - values.mean(1, keepdim=True)).norm(dim=-1)
    task = functools.partial(_weighted_of_head, ranks=_possible(ranks, weights), near=near, causal=causal)
    found = torch.stack(_each_head(task, _by_head(weights, gradients, lengths)))
    return found / (2 * weights.shape[1])


def _by_head(*stacked: Tensor) -> list[tuple[Tensor, ...]]:
    """A head each. A view would take the whole layer along to its process, and that works on the CPU."""
    return [tuple(x[head].clone().cpu() for x in stacked) for head in range(len(stacked[0]))]


def _possible(ranks: Sequence[int], weights: Tensor) -> list[int]:
    return [min(rank, weights.shape[-1]) for rank in ranks]


def _each_head(task: Callable[[Any], Any], jobs: Sequence[tuple[Tensor, ...]]) -> list[Any]:
    """The result of every head, in order."""
    found: dict[int, Any] = {}
    with _one_thread() as threads:
        workers = min(threads, len(jobs)) if jobs[0][0].shape[-1] >= PARALLEL_FROM else 1
        for outcome in run(task, jobs, workers=workers):
            if outcome.error is not None:
                raise AttngapError(f"The bounds of head {outcome.index} failed: {outcome.error}")
            found[outcome.index] = outcome.value
    return [found[head] for head in range(len(jobs))]


def _weighted_of_head(
    job: tuple[Tensor, Tensor, Tensor], *, ranks: Sequence[int], near: tuple[int, int], causal: bool
) -> Tensor:
    with _one_thread():
        return weighted_floor(*job, ranks, *near, causal=causal, cells=CELLS).value


def _of_head(job: tuple[Tensor, Tensor], *, ranks: Sequence[int], near: tuple[int, int], causal: bool) -> Bounds:
    """The same for one head, without the leading axis; in one thread wherever it runs, so that it rounds alike."""
    weights, values = job
    with _one_thread():
        low = floor(weights, ranks, *near, causal=causal, cells=CELLS)
        high = ceiling(weights, ranks, *near, causal=causal)
        assert high.weights is not None
        return Bounds(
            floor=low.relative,
            ceiling=high.relative,
            far=low.far / low.whole,
            spectrum=_mid_spectrum(weights, causal, *near),
            change=(high.weights - weights.double()).float() @ values,
            cuts=low.cuts,
            possible=low.possible,
        )


def _mid_spectrum(weights: Tensor, causal: bool, window: int, sinks: int) -> Tensor:
    """Singular values of the far block at mid-sequence, where a state must carry most."""
    n = weights.shape[-1]
    if causal:
        far = weights[sinks + window :, sinks : max(sinks, n - window)].tril()
        cut = far.shape[-1] // 2
        weights = far[cut:, : cut + 1]
    gram = weights.double() @ weights.double().mT
    return torch.linalg.eigvalsh(gram).clamp(min=0).sqrt().flip(-1).float()


@contextlib.contextmanager
def _one_thread() -> Iterator[int]:
    """Yields how many there were."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield threads
    finally:
        torch.set_num_threads(threads)
