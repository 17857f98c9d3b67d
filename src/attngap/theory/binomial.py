"""Tails of a fair binomial in log space, with full relative precision from the middle to the last atom, any size.

scipy's `binom.logsf` underflows to -inf below 1e-308 and is off by 1e-8 at a count of 1e15.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln

Array = NDArray[np.float64]
Numbers = int | float | Sequence[int] | NDArray[np.int64] | Array

# Beyond exp(-REACH) of its start the integrand below adds nothing to a double.
REACH = 42.0
PANELS = 6
SUMMED = 1 << 16  # intervals up to this many atoms are summed, wider ones are differences of tails

_nodes, _node_weights = np.polynomial.legendre.leggauss(32)
_unit = ((np.arange(PANELS)[:, None] + (_nodes + 1) / 2) / PANELS).ravel()  # nodes on 0..1
_unit_weights = np.tile(_node_weights / 2 / PANELS, PANELS)


def log_pmf(count: int, x: Numbers) -> Array:
    """log P(X = x), X the number of heads in `count` fair tosses.

    Stirling with its error terms split off (Loader 2000), so that nothing large cancels: with e = (2x - N) / N the
    exponent is -N/2 (2 e atanh e + log(1 - e^2)).
    """
    x = np.asarray(x, dtype=np.float64)
    if count == 0:
        return np.where(x == 0, 0.0, -np.inf)
    inside = (x > 0) & (x < count)
    y = np.where(inside, x, 0.5 * count)
    e = (2 * y - count) / count
    exponent = -0.5 * count * (2 * e * np.arctanh(e) + np.log1p(-e * e))
    error = _stirling_error(count) - _stirling_error(y) - _stirling_error(count - y)
    body = exponent + error + 0.5 * np.log(count / (2 * np.pi * y * (count - y)))
    edge = np.where((x == 0) | (x == count), -count * np.log(2.0), -np.inf)
    return np.where(inside, body, edge)


def log_upper(count: int, x: Numbers) -> Array:
    """log P(X >= x). Above the middle from an integral of one sign, below it from the complement."""
    x = np.clip(np.asarray(x, dtype=np.float64), 0, count + 1.0)
    if count == 0:
        return np.where(x == 0, 0.0, -np.inf)
    mirrored = 2 * x <= count
    far = np.where(mirrored, count - x + 1, x)
    tail = np.where(
        far > count, -np.inf, log_pmf(count, far) + np.log(_mills(count, np.asarray(np.minimum(far, count))))
    )
    with np.errstate(divide="ignore"):
        return np.where(mirrored, np.log1p(-np.exp(tail)), tail)


def log_between(count: int, lo: int, hi: int) -> float:
    """log P(lo <= X < hi)."""
    lo, hi = max(lo, 0), min(hi, count + 1)
    if hi <= lo:
        return -np.inf
    if hi - lo <= SUMMED:
        logs = log_pmf(count, np.arange(lo, hi))
        return float(logs.max() + np.log(np.exp(logs - logs.max()).sum()))
    if lo + hi < count + 1:  # mirror, so that the larger tail is the one at lo
        lo, hi = count + 1 - hi, count + 1 - lo
    if 2 * lo > count:
        near, beyond = log_upper(count, [lo, hi])
        return float(near + np.log1p(-np.exp(beyond - near)))
    below, above = log_upper(count, [count - lo + 1, hi])
    return float(np.log1p(-np.exp(below) - np.exp(above)))


def _mills(count: int, x: Array) -> Array:
    """P(X >= x) / P(X = x) = x * integral over 0..1 of (1-v)^(x-1) (1+v)^(N-x) dv, for 2x > N.

    The integrand's logarithm (N-x) log(1-v^2) + (2x-1-N) log(1-v) falls from 0 and has no cancellation.
    """
    square, line = (count - x)[..., None], (2 * x - 1 - count)[..., None]
    line = np.maximum(line, 0.0)
    # square v^2 + line v = REACH, in the form that survives square = 0
    end = 2 * REACH / (line + np.sqrt(line * line + 4 * square * REACH) + 1e-300)
    v = np.minimum(end, 1.0) * _unit
    with np.errstate(divide="ignore"):
        height = np.exp(square * np.log1p(-v * v) + line * np.log1p(-v))
    return np.asarray(x * np.minimum(end[..., 0], 1.0) * (height * _unit_weights).sum(-1))


def _stirling_error(n: Numbers) -> Array:
    """log n! - log(sqrt(2 pi n) (n/e)^n)."""
    n = np.asarray(n, dtype=np.float64)
    small = np.minimum(n, 16.0)
    direct = gammaln(small + 1) - (small + 0.5) * np.log(small) + small - 0.5 * np.log(2 * np.pi)
    s = 1 / np.maximum(n, 16.0)
    s2 = s * s
    series = s * (1 / 12 - s2 * (1 / 360 - s2 * (1 / 1260 - s2 * (1 / 1680 - s2 / 1188))))
    return np.where(n < 16, direct, series)
