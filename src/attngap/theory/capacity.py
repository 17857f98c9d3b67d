"""How many associations a linear state holds: an empirical law, and a Monte Carlo that shows where it fails."""

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from attngap.errors import AttngapError, unknown
from attngap.theory.montecarlo import Estimate

LOADS = (0.125, 0.25, 0.5, 1.0, 2.0)
SCORES = 1 << 24  # read-out scores held at once


@dataclasses.dataclass(frozen=True)
class Capacity:
    """Argmax recall from a `rank` x `value_dim` state over a codebook: an empirical law, not a bound."""

    rank: int
    value_dim: int
    vocabulary: int

    @property
    def half(self) -> float:
        """Associations at which about half are recalled: r d_v / (2 ln V)."""
        return self.rank * self.value_dim / (2 * math.log(self.vocabulary))

    @property
    def reliable(self) -> float:
        """Associations at which about 97% are recalled: a quarter of `half`."""
        return self.half / 4


def capacity(rank: int, value_dim: int, vocabulary: int) -> Capacity:
    """The law for random keys and a random codebook.

    >>> round(capacity(64, 64, 1000).half)
    296
    """
    for name, x, lowest in (("rank", rank, 1), ("value_dim", value_dim, 1), ("vocabulary", vocabulary, 2)):
        if x < lowest:
            raise AttngapError(f"capacity: {name} must be at least {lowest}, got {x}")
    return Capacity(rank, value_dim, vocabulary)


def _gaussian(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    return torch.nn.functional.normalize(torch.randn(*shape, generator=generator), dim=-1)


def _positive(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Nonnegative features: keys overlap, so every read-out carries the mean of all values."""
    return _gaussian(shape, generator).abs()


def _orthogonal(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """An orthonormal basis, repeated once it is used up: perfect to N = rank, then collisions."""
    trials, count, rank = shape
    basis = torch.linalg.qr(torch.randn(trials, rank, rank, generator=generator)).Q
    return basis.repeat(1, -(-count // rank), 1)[:, :count]


KEYS: dict[str, Callable[[Sequence[int], torch.Generator], Tensor]] = {
    "gaussian": _gaussian,
    "positive": _positive,
    "orthogonal": _orthogonal,
}


def recall(
    capacity: Capacity, count: int, *, keys: str = "gaussian", trials: int = 8, seed: int = 0, confidence: float = 0.99
) -> Estimate:
    """Store `count` pairs in S = sum k v^T, read each key back, take the nearest code: the share that is right."""
    if keys not in KEYS:
        raise unknown("kind of keys", keys, KEYS)
    if count < 1:
        raise AttngapError(f"recall: count must be at least 1, got {count}")
    generator = torch.Generator().manual_seed(seed)
    right = 0
    for _ in range(trials):
        right += _recalled(capacity, KEYS[keys]((1, count, capacity.rank), generator)[0], generator)
    return Estimate.of(right, trials * count, confidence)


def _recalled(capacity: Capacity, key: Float[Tensor, "n r"], generator: torch.Generator) -> int:
    codebook = _gaussian((capacity.vocabulary, capacity.value_dim), generator)
    label = torch.randint(capacity.vocabulary, (len(key),), generator=generator)
    state = key.mT @ codebook[label]  # (r, d_v)
    right = 0
    for part, wanted in zip(*(x.split(max(1, SCORES // capacity.vocabulary)) for x in (key, label)), strict=True):
        right += int(((part @ state @ codebook.mT).argmax(-1) == wanted).sum())
    return right


def curve(capacity: Capacity, *, keys: str = "gaussian", trials: int = 8, seed: int = 0) -> list[dict[str, float]]:
    """Recall at multiples of `half`: about 0.97 at a quarter, about 0.5 at one, where the law holds."""
    rows = []
    for load in LOADS:
        count = max(1, round(load * capacity.half))
        found = recall(capacity, count, keys=keys, trials=trials, seed=seed)
        rows.append({"load": load, "count": count, "recall": found.value, "low": found.low, "high": found.high})
    return rows
