"""The separation law: when does one attention layer tell a planted needle from its absence? Exact, for any n.

A construction in the style of Deng, Song, Yuan, Zhou (arXiv 2310.11685), with our own constants and analysis. n tokens
in dimension d, p = d - 2, t = n / p, L = log n: column 1 holds a sqrt(L) at row j*, columns 2..d-1 are b sqrt(L) times
the p x p identity stacked t times, the last is c sqrt(L), b + c = 1. Queries = keys = values, weight s 11^T, then m
random sign read-outs y_l: F = sum_i sum_l phi(z_il), phi(z) = z above tau = (c + 0.1) sqrt(L), else 0. It separates
when F(A1) > 0 and F(A0) = 0 under the same signs.

The statement is about these weights. Linear attention with another weight (kernel `tilted`) separates as well; what
it needs is a score *ratio* that grows like n, where softmax needs a logit *gap* that grows like log n.
"""

import dataclasses
import functools
import math
from decimal import Decimal
from typing import NamedTuple

import numpy as np

from attngap.errors import AttngapError
from attngap.theory import kernels
from attngap.theory.binomial import log_between, log_upper
from attngap.theory.kernels import Kernel, Number, exact

MARGIN = 0.1  # tau = (c + MARGIN) sqrt(L)
LARGEST_N = 10**15  # counts up to here are exact in a double
SIGNS = tuple((first, own, last) for first in (1, -1) for own in (1, -1) for last in (1, -1))
TIE = Decimal(10) ** -40  # thresholds are computed to 60 digits; nearer to an integer than this is that integer


class Mass(NamedTuple):
    """Weight on the needle: in the needle's own row, and in every other row."""

    needle_row: float
    other_rows: float


@dataclasses.dataclass(frozen=True)
class Setting:
    """One instance of the construction, checked."""

    kernel: Kernel
    n: int
    d: int
    a0: Number
    a1: Number
    b: Number
    m: int
    scale: Number = 1.0
    aq: Number | None = None  # needle of the queries; None: self-attention, the queries' needle is the keys'

    def __post_init__(self) -> None:
        kernels.check(self.kernel)
        for name, lowest in (("n", 3), ("d", 3), ("m", 1)):
            if getattr(self, name) < lowest:
                raise AttngapError(f"{name} must be a whole number of at least {lowest}, got {getattr(self, name)}")
        if self.n > LARGEST_N:
            raise AttngapError(f"n must be at most 1e15, got {self.n:.3g}: larger counts are not exact in a double")
        if self.n % self.p:
            below = self.n // self.p * self.p
            nearest = f"{below} or {below + self.p}" if below else f"{self.p}"
            raise AttngapError(f"n must be a multiple of d - 2 = {self.p}, got {self.n}. Nearest: {nearest}")
        check_split(self.b, self.c)
        if not 0 <= self.a0 < self.a1 < math.inf:
            raise AttngapError(f"needles must satisfy 0 <= a0 < a1, got a0={self.a0}, a1={self.a1}")
        if not 0 < self.scale < math.inf:
            raise AttngapError(f"scale must be positive, got {self.scale}")
        if self.aq is not None and not 0 <= self.aq < math.inf:
            raise AttngapError(f"aq, the needle of the queries, must be at least 0, got {self.aq}")

    @property
    def p(self) -> int:
        return self.d - 2

    @property
    def c(self) -> float:
        return float(1 - exact(self.b))

    @property
    def copies(self) -> int:
        """t = n / p, how often each basis token occurs."""
        return self.n // self.p

    def ratios(self, needle: Number) -> tuple[Decimal, Decimal]:
        """Kernel ratio of the needle to any other key, in the needle's row and in every other row."""
        query = needle if self.aq is None else self.aq
        own = kernels.ratio(self.kernel, self.n, self.scale, needle, query)
        return own, kernels.ratio(self.kernel, self.n, self.scale, needle, 0.0)

    def weigh(self, needle: Number) -> Mass:
        """Weight on a needle of that size."""
        with kernels.precise():
            own, other = (float(r / (r + self.n - 1)) for r in self.ratios(needle))
        return Mass(own, other)

    def thresholds(self, needle: Number) -> list[int]:
        """For each of SIGNS = (y_1, y_*, y_d): the fewest +1 among the other p - 1 signs at which some row fires.

        A row with ratio rho has w = rho / (rho+n-1), alpha = (rho+t-1) / (rho+n-1), beta = t / (rho+n-1) and fires when
        S' > theta = (c + 0.1 - c y_d - w a y_1 - b alpha y_*) / (b beta); S' = 2 X - (p - 1).
        """
        with kernels.precise():
            a, b, c = exact(needle), exact(self.b), 1 - exact(self.b)
            ratios = set(self.ratios(needle))
            fewest = []
            for first, own, last in SIGNS:
                least = self.p  # never reached by p - 1 signs
                for rho in ratios:
                    bar = (c + exact(MARGIN) - c * last) * (rho + self.n - 1)
                    theta = (bar - rho * a * first - b * (rho + self.copies - 1) * own) / (b * self.copies)
                    least = min(least, _first_above((theta + self.p - 1) / 2, self.p))
                fewest.append(least)
        return fewest


def _first_above(x: Decimal, highest: int) -> int:
    """The smallest integer in 0..highest strictly above x."""
    if x < 0:
        return 0
    if x >= highest - 1:
        return highest
    nearest = x.to_integral_value()
    return int(nearest) + 1 if nearest <= x or abs(x - nearest) < TIE else int(nearest)


def check_split(b: Number, c: Number) -> None:
    """Refuse unless b + c = 1 and both are at least 0.1."""
    if not math.isclose(b + c, 1.0, rel_tol=0, abs_tol=1e-12):
        raise AttngapError(f"b + c must be 1, got b={b} and c={c}, which make {b + c:g}")
    if min(b, c) < 0.1 - 1e-12:
        raise AttngapError(f"b and c = 1 - b must both be at least 0.1, got b={b:g} and c={c:g}")


@dataclasses.dataclass(frozen=True)
class Law(Setting):
    """The exact law. Probabilities come with their logarithm, so that none underflows; success with its complement.

    q0, q1: one read-out fires on D0, on D1. q01: on either. Everything is derived from integer thresholds.
    """

    @functools.cached_property
    def fewest(self) -> tuple[list[int], list[int]]:
        """`thresholds` on D0 and on D1."""
        return self.thresholds(self.a0), self.thresholds(self.a1)

    @functools.cached_property
    def _log_fires(self) -> tuple[float, float, float]:
        zero, one = (np.array(x, dtype=np.float64) for x in self.fewest)
        all_tails = log_upper(self.p - 1, np.stack([zero, one, np.minimum(zero, one)]))
        first, second, third = (float(np.logaddexp.reduce(row)) - math.log(len(SIGNS)) for row in all_tails)
        return first, second, third

    @property
    def log_q0(self) -> float:
        return self._log_fires[0]

    @property
    def log_q1(self) -> float:
        return self._log_fires[1]

    @property
    def log_q01(self) -> float:
        return self._log_fires[2]

    @functools.cached_property
    def log_only1(self) -> float:
        """log(q01 - q0), a read-out fires on D1 alone: summed over intervals, never a difference of near equals."""
        parts = [log_between(self.p - 1, one, zero) for zero, one in zip(*self.fewest, strict=True)]
        return float(np.logaddexp.reduce(parts)) - math.log(len(SIGNS))

    @property
    def q0(self) -> float:
        return math.exp(self.log_q0)

    @property
    def q1(self) -> float:
        return math.exp(self.log_q1)

    @property
    def q01(self) -> float:
        return math.exp(self.log_q01)

    @property
    def mass(self) -> Mass:
        """Weight on D1's needle."""
        return self.weigh(self.a1)

    @property
    def mass0(self) -> Mass:
        """Weight on D0's needle."""
        return self.weigh(self.a0)

    def log_positive(self, which: int) -> float:
        """log P(F > 0) on D0 (which=0) or D1: log(1 - (1 - q)^m)."""
        return _log_any(self.log_q1 if which else self.log_q0, self.m)

    @property
    def log_success(self) -> float:
        """log((1-q0)^m - (1-q01)^m), as (1-q0)^m times the chance that D1 alone fires given that D0 does not."""
        quiet = math.log1p(-self.q0)
        return self.m * quiet + _log_any(self.log_only1 - quiet, self.m)

    @property
    def success(self) -> float:
        return math.exp(self.log_success)

    @property
    def log_failure(self) -> float:
        """log(1 - success) = log(P(F(A0) > 0) + P(neither fires)): both terms positive, so exact near success 1."""
        return float(np.logaddexp(_log_any(self.log_q0, self.m), self.m * math.log1p(-self.q01)))

    @property
    def failure(self) -> float:
        return math.exp(self.log_failure)

    @property
    def best_m(self) -> Number:
        """The number of read-outs with the highest success: log(B/A)/(A-B), A = log(1-q0), B = log(1-q01).

        Infinite when D0 never fires, 1 when D1 adds nothing.
        """
        if self.log_only1 == -math.inf:
            return 1
        if self.log_q0 == -math.inf:
            return math.inf
        quiet, none = math.log1p(-self.q0), math.log1p(-self.q01)
        if quiet == 0.0:  # q0 below the smallest double: its logarithm is all there is
            peak = (math.log(-none) - self.log_q0) / -none
        else:
            peak = math.log(none / quiet) / -math.log1p(-math.exp(self.log_only1) / (1 - self.q0))
        tried = {max(1, math.floor(peak)), max(1, math.ceil(peak))}
        return max(tried, key=lambda m: dataclasses.replace(self, m=m).log_success)


def law(
    kernel: Kernel,
    *,
    n: Number,
    d: Number,
    a0: Number,
    a1: Number,
    b: Number,
    m: Number,
    scale: Number = 1.0,
    aq: Number | None = None,
    c: Number | None = None,
) -> Law:
    """The exact law of the construction for one kernel; see `Law`.

    `kernel` is "softmax", "linear", ("polynomial", k) or ("tilted", E). c defaults to 1 - b. n, d and m may be floats
    with a whole value, such as 1e12.

    >>> law("softmax", n=2**20, d=514, a0=0.05, a1=0.7, b=0.5, m=40).success > 0.999
    True
    """
    if c is not None:
        check_split(b, c)
    for name, x in (("n", n), ("d", d), ("m", m)):
        if not float(x).is_integer():
            raise AttngapError(f"{name} must be a whole number, got {x}")
    return Law(kernels.check(kernel), int(n), int(d), a0, a1, b, int(m), scale, aq)


def _log_any(log_q: Number, m: Number) -> float:
    """log(1 - (1 - q)^m) from log q."""
    if log_q == -math.inf:
        return -math.inf
    none = m * math.log1p(-math.exp(log_q)) if log_q > -700 else -math.exp(math.log(m) + log_q)
    return math.log(-math.expm1(none)) if none < -1e-290 else math.log(m) + log_q
