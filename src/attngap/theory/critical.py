"""Where the separation law turns: the critical needle, scale and dimension, by formula and by search."""

import math
from collections.abc import Callable, Iterator

import numpy as np
from scipy.optimize import root_scalar
from scipy.stats import norm

from attngap.errors import AttngapError
from attngap.theory import kernels
from attngap.theory.kernels import Kernel, Number
from attngap.theory.separation import MARGIN, law

HIGHEST_NEEDLE = 4.0
SCAN = 64


def concentration_needle(scale: Number = 1.0, aq: Number | None = None) -> float:
    """The needle above which softmax's weight on it tends to 1: s a (1 + a) = 1; s a (1 + aq) = 1 for cross-attention.

    >>> round(concentration_needle(), 6)  # the inverse golden ratio
    0.618034
    """
    return (math.sqrt(1 + 4 / scale) - 1) / 2 if aq is None else 1 / (scale * (1 + aq))


def critical_mass(needle: Number, b: Number) -> float:
    """w_c: a read-out with y_1 = y_* = y_d = 1 clears the threshold when w (a + b) > 0.1, for d large."""
    return MARGIN / (needle + b)


def critical_needle(
    kernel: Kernel,
    n: Number,
    b: Number,
    scale: Number = 1.0,
    aq: Number | None = None,
    highest: Number = HIGHEST_NEEDLE,
) -> float:
    """The needle at which the needle row's weight reaches `critical_mass`, for d large; inf if above `highest`.

    For softmax: s a (1 + a) = 1 + log(w_c / (1 - w_c)) / log n, which approaches `concentration_needle` like 1 / log n.

    >>> round(critical_needle("softmax", 1e6, 0.5), 3)
    0.543
    """
    kernel = kernels.check(kernel)

    def excess(a: Number) -> float:
        """log of (kernel ratio) / (ratio needed)."""
        with kernels.precise():
            log_ratio = float(kernels.ratio(kernel, int(n), scale, a, a if aq is None else aq).ln())
        needed = critical_mass(a, b)
        return log_ratio - math.log(needed / (1 - needed)) - math.log(n - 1)

    if b <= MARGIN or excess(highest) < 0:
        return 0.0 if b <= MARGIN else math.inf
    return 0.0 if excess(0.0) >= 0 else root_scalar(excess, bracket=(0.0, highest), xtol=1e-13).root


def critical_scale(needle: Number, n: Number, b: Number, aq: Number | None = None) -> float:
    """Softmax: the scale at which a needle becomes visible, s = (1 + log(w_c/(1-w_c)) / log n) / (a (1 + a))."""
    needed = critical_mass(needle, b)
    exponent = (math.log(needed / (1 - needed)) + math.log(n - 1)) / math.log(n)
    return max(0.0, exponent) / (needle * (1 + (needle if aq is None else aq)))


def critical_degree(needle: Number, n: Number) -> float:
    """k* = log(n - 1) / log(1 + a): the polynomial degree that puts half the mass on the needle."""
    return math.log(n - 1) / math.log1p(needle)


def reach(needle: Number, b: Number, scale: Number = 1.0, aq: Number | None = None) -> float:
    """n* = ((1 - w_c) / w_c)^(1 / (1 - kappa)): the context to which softmax sees a needle below the critical one.

    kappa = s a (1 + a), or s a (1 + aq). Infinite from kappa = 1 on.
    """
    kappa = scale * needle * (1 + (needle if aq is None else aq))
    if kappa >= 1:
        return math.inf
    needed = critical_mass(needle, b)
    exponent = math.log((1 - needed) / needed) / (1 - kappa)
    return math.exp(exponent) if exponent < 709 else math.inf


def least_dimension(b: Number, m: int, failure: Number) -> float:
    """About d - 2 > 100 b^2 Qinv(2 delta / m)^2: below it D0 fires by chance (Gaussian approximation)."""
    return 2 + (b / MARGIN) ** 2 * float(norm.isf(min(0.5, 2 * failure / m))) ** 2


def smallest_d(
    kernel: Kernel, success: Number, *, n: int, a0: Number, a1: Number, b: Number, m: int, scale=1.0, aq=None
) -> int | None:
    """The smallest d with (d - 2) dividing n that succeeds with probability at least `success`; None if none does."""
    _check_probability(success)
    for p in divisors(n):
        found = law(kernel, n=n, d=p + 2, a0=a0, a1=a1, b=b, m=m, scale=scale, aq=aq)
        if found.success >= success:
            return p + 2
    return None


def needle_for(
    kernel: Kernel,
    success: Number,
    *,
    n: int,
    d: int,
    a0: Number,
    b: Number,
    m: int,
    scale: Number = 1.0,
    aq: Number | None = None,
    highest: Number = HIGHEST_NEEDLE,
) -> float:
    """The smallest needle a1 in (a0, highest] that succeeds with probability at least `success`; inf if none does."""
    _check_probability(success)

    def enough(a1: Number) -> bool:
        return law(kernel, n=n, d=d, a0=a0, a1=a1, b=b, m=m, scale=scale, aq=aq).success >= success

    return first_true(enough, a0, highest)


def first_true(
    holds: Callable[[float], bool], lo: Number, hi: Number, scan: int = SCAN, tolerance: Number = 1e-9
) -> float:
    """The first crossing of a predicate seen on a grid of (lo, hi], refined by bisection; inf if it never holds."""
    for x in np.linspace(lo, hi, scan + 1)[1:]:
        if holds(float(x)):
            hi = float(x)
            break
        lo = float(x)
    else:
        return math.inf
    while hi - lo > tolerance:
        middle = (lo + hi) / 2
        lo, hi = (lo, middle) if holds(middle) else (middle, hi)
    return hi


def divisors(n: int) -> Iterator[int]:
    """Divisors of n in ascending order, by trial division in blocks."""
    small: list[int] = []
    root = math.isqrt(n)
    for start in range(1, root + 1, 1 << 20):
        block = np.arange(start, min(start + (1 << 20), root + 1))
        for divisor in block[n % block == 0].tolist():
            small.append(divisor)
            yield divisor
    yield from (n // divisor for divisor in reversed(small) if divisor * divisor != n)


def _check_probability(success: Number) -> None:
    if not 0 < success < 1:
        raise AttngapError(f"the wanted success must lie strictly between 0 and 1, got {success}")
