"""Floor and ceiling of every head of a layer, and what the ceiling's weights would do to the head's output."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from jaxtyping import Float
from torch import Tensor

from attngap.theory.certificates import ceiling, floor

CELLS = (
    4,
    2,
)  # cuts of the floor's recursion: a third of the default's time, and the same floor but for the third digit


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Of one layer on one sequence. Shares of the squared norm of what window and sinks leave over (`far`)."""

    floor: Float[Tensor, "h ranks"]
    ceiling: Float[Tensor, "h ranks"]
    far: Float[Tensor, " h"]  # share of the whole matrix's squared norm that is far
    spectrum: Float[Tensor, "h r"]  # singular values of the mid-sequence block, largest first
    change: Float[Tensor, "h ranks t dv"]  # of the output under the ceiling's weights
    cuts: int
    possible: int


def bounds(
    weights: Float[Tensor, "h t t"],
    values: Float[Tensor, "h t dv"],
    ranks: Sequence[int],
    *,
    window: int,
    sinks: int,
    causal: bool,
) -> Bounds:
    """Certificates of each head, a head a thread: the matrices are too small for LAPACK to share one well."""
    near = (window, sinks) if causal else (0, 0)
    ranks = [min(rank, weights.shape[-1]) for rank in ranks]

    def one(head: int):
        low = floor(weights[head], ranks, *near, causal=causal, cells=CELLS)
        lines = _mid_spectrum(weights[head], causal, *near)
        high = ceiling(weights[head], ranks, *near, causal=causal)
        assert high.weights is not None
        change = (high.weights - weights[head].double()).float() @ values[head]  # (ranks, t, dv)
        return low, lines, high.relative, change

    with _one_thread(), ThreadPoolExecutor(torch.get_num_interop_threads()) as pool:
        low, lines, high, change = zip(*pool.map(one, range(weights.shape[0])), strict=True)
    return Bounds(
        floor=torch.stack([item.relative for item in low]),
        ceiling=torch.stack(high),
        far=torch.stack([item.far / item.whole for item in low]),
        spectrum=torch.stack(lines),
        change=torch.stack(change),
        cuts=low[0].cuts,
        possible=low[0].possible,
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
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
