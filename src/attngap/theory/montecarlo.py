"""The separation law by brute force on explicit matrices: every sign vector at small d, random ones beyond."""

import dataclasses
import itertools

import torch
from scipy.stats import binomtest

from attngap.errors import AttngapError
from attngap.theory.datasets import fires, mixed
from attngap.theory.separation import Setting

ENTRIES = 1 << 24  # read-out values held at once
MOST_SIGNS = 20  # 2^20 sign vectors


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A frequency with its Wilson interval."""

    value: float
    low: float
    high: float
    trials: int

    @classmethod
    def of(cls, hits: int, trials: int, confidence: float) -> "Estimate":
        interval = binomtest(hits, trials).proportion_ci(confidence, method="wilson")
        return cls(hits / trials, float(interval.low), float(interval.high), trials)

    def covers(self, probability: float) -> bool:
        return self.low <= probability <= self.high


def enumerate_signs(setting: Setting, row: int = 0) -> tuple[int, int, int]:
    """Of all 2^d sign vectors, how many fire on D0, on D1, on either: explicit n x n weights, no formula."""
    if setting.d > MOST_SIGNS:
        raise AttngapError(f"enumeration takes d up to {MOST_SIGNS}, got {setting.d}: there are 2^d sign vectors")
    signs = torch.tensor(list(itertools.product((1.0, -1.0), repeat=setting.d)), dtype=torch.float64).mT
    zero, one = (fires(out, signs, setting.b) for out in _outputs(setting, row))
    return int(zero.sum()), int(one.sum()), int((zero | one).sum())


def estimate(setting: Setting, trials: int = 1000, seed: int = 0, confidence: float = 0.99) -> dict[str, Estimate]:
    """Frequencies of success, F(A0) > 0 and F(A1) > 0 over random needles and signs, the same signs on both datasets.

    A fresh needle row for each chunk of trials; chunks bound the memory to the n x n weights and 128 MB.
    """
    generator = torch.Generator().manual_seed(seed)
    chunk = max(1, min(trials, ENTRIES // (setting.n * setting.m)))
    counts = {"success": 0, "fires0": 0, "fires1": 0}
    for start in range(0, trials, chunk):
        size = min(chunk, trials - start)
        row = int(torch.randint(setting.n, (1,), generator=generator))
        signs = torch.randint(2, (setting.d, size * setting.m), generator=generator).double() * 2 - 1
        zero, one = (fires(out, signs, setting.b).view(size, setting.m).any(1) for out in _outputs(setting, row))
        counts["success"] += int((one & ~zero).sum())
        counts["fires0"] += int(zero.sum())
        counts["fires1"] += int(one.sum())
    return {name: Estimate.of(hits, trials, confidence) for name, hits in counts.items()}


def _outputs(setting: Setting, row: int) -> list[torch.Tensor]:
    s = setting
    return [mixed(s.kernel, s.n, s.d, needle, s.b, row, s.scale, s.aq) for needle in (s.a0, s.a1)]
