"""The full distribution of F on one dataset: atoms of one read-out, moments, and a bracketed distribution function."""

import dataclasses
import math

import numpy as np
from numpy.typing import NDArray

from attngap.errors import AttngapError
from attngap.theory import kernels
from attngap.theory.binomial import log_pmf
from attngap.theory.separation import MARGIN, SIGNS, Law

Array = NDArray[np.float64]
MOST_ATOMS = 1 << 24


@dataclasses.dataclass(frozen=True)
class Distribution:
    """F = sum of m independent read-outs, each zero or one of `values`. In units of sqrt(log n).

    `grid`, `low`, `high`: low <= P(F <= x) <= high at each grid point x. The bracket comes from rounding every atom up
    and down to the grid before the m-fold convolution, so it is as wide as the grid is coarse.
    """

    m: int
    values: Array
    probabilities: Array
    zero: float  # P(F = 0)
    grid: Array
    low: Array
    high: Array

    @property
    def mean(self) -> float:
        return self.m * float(self.values @ self.probabilities)

    @property
    def variance(self) -> float:
        second = float(self.values**2 @ self.probabilities)
        return self.m * (second - float(self.values @ self.probabilities) ** 2)


def distribution(law: Law, which: int, points: int = 1 << 14) -> Distribution:
    """F's distribution on D0 (which=0) or D1 (which=1).

    A read-out with signs (y_1, y_*, y_d) and X heads among the other p - 1 adds, over the needle's row and the n - 1
    others, phi(c y_d + w a y_1 + b (alpha y_* + beta (2 X - p + 1))).
    """
    values, probabilities = _atoms(law, law.a1 if which else law.a0, law.fewest[which])
    zero = math.exp(law.m * math.log1p(-math.exp(law.log_q1 if which else law.log_q0)))
    if not len(values):
        nothing = np.zeros(1)
        return Distribution(law.m, values, probabilities, zero, nothing, nothing + 1, nothing + 1)
    step = law.m * values.max() / (points - law.m - 1)
    if step <= 0 or points <= 2 * law.m:
        raise AttngapError(f"distribution: points must exceed 2 m = {2 * law.m}, got {points}")
    place = values / step
    down, up = (
        _convolved(law.m, rounded.astype(np.int64), probabilities, points) for rounded in (place // 1, -(-place // 1))
    )
    return Distribution(law.m, values, probabilities, zero, step * np.arange(points), up, down)


def _convolved(m: int, places: NDArray[np.int64], probabilities: Array, points: int) -> Array:
    """Distribution function of the sum of m atoms on a grid that no sum can leave."""
    one = np.bincount(places, probabilities, minlength=points)
    one[0] += 1 - probabilities.sum()
    density = np.fft.irfft(np.fft.rfft(one, 2 * points) ** m, 2 * points)[:points]
    return np.clip(np.cumsum(density), 0.0, 1.0)


def _atoms(law: Law, needle: float, fewest: list[int]) -> tuple[Array, Array]:
    """Positive values of one read-out and their probabilities."""
    count, c = law.p - 1, law.c
    if sum(max(0, law.p - least) for least in fewest) > MOST_ATOMS:
        raise AttngapError(f"distribution: d = {law.d} has more than {MOST_ATOMS} atoms; take a smaller d")
    with kernels.precise():
        shares = [
            (
                float(r / (r + law.n - 1)),
                float((r + law.copies - 1) / (r + law.n - 1)),
                float(law.copies / (r + law.n - 1)),
            )
            for r in law.ratios(needle)
        ]
    values, logs = [], []
    for (first, own, last), least in zip(SIGNS, fewest, strict=True):
        heads = np.arange(least, law.p)
        total = np.zeros(len(heads))
        for rows, (w, alpha, beta) in zip((1, law.n - 1), shares, strict=True):
            z = c * last + w * needle * first + law.b * (alpha * own + beta * (2 * heads - count))
            total += rows * np.where(z > c + MARGIN, z, 0.0)
        values.append(total)
        logs.append(log_pmf(count, heads) - math.log(len(SIGNS)))
    return np.concatenate(values), np.exp(np.concatenate(logs))
