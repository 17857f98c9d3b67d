"""Interval enclosures of the success probability, with python-flint's ball arithmetic. Optional: extra `rigor`."""

import dataclasses
import math
from fractions import Fraction
from types import ModuleType

from attngap.errors import AttngapError, missing_extra
from attngap.theory.separation import MARGIN, SIGNS, Law

BITS = (256, 1024, 4096)


@dataclasses.dataclass(frozen=True)
class Enclosure:
    """The success probability lies in [low, high], doubles rounded outward; `width` is that of the ball itself.

    `digits` are ten of its midpoint.
    """

    low: float
    high: float
    width: float
    digits: str


def enclose(law: Law) -> Enclosure:
    """A proof by interval arithmetic: thresholds from rationals or balls, tails from the incomplete beta function.

    Parameters are the decimals they print as. Precision rises until every threshold is decided and the ball is
    narrower than a double can show.
    """
    flint = _flint()
    before = flint.ctx.prec
    try:
        for bits in BITS:
            flint.ctx.prec = bits
            ball = _success(flint, law)
            if ball is not None and _narrow(ball):
                return Enclosure(
                    low=0.0 if ball.is_zero() else max(0.0, math.nextafter(float(ball.lower()), -1.0)),
                    high=0.0 if ball.is_zero() else min(1.0, math.nextafter(float(ball.upper()), 2.0)),
                    width=2 * float(ball.rad()),
                    digits=ball.str(10, radius=False),
                )
    finally:
        flint.ctx.prec = before
    raise AttngapError(f"certified: undecided with {BITS[-1]} bits, a threshold is too near a tie. Change a1 a little")


def _flint() -> ModuleType:
    try:
        import flint
    except ImportError:
        raise missing_extra("certified needs", "rigor") from None
    return flint


def _narrow(ball) -> bool:
    return ball.is_zero() or ball.rel_accuracy_bits() >= 60


def _success(flint: ModuleType, law: Law):
    """(1-q0)^m - (1-q01)^m as a ball, or None where a threshold is not decided at this precision.

    As (1-q0)^m (1 - (1 - x)^m), x the chance that D1 alone fires given that D0 does not: no cancellation near zero.
    """
    fires, only = flint.arb(0), flint.arb(0)
    for signs in SIGNS:
        zero, one = (_fewest(flint, law, needle, signs) for needle in (law.a0, law.a1))
        if zero is None or one is None:
            return None
        tail = _tail(flint, law.p - 1, zero)
        fires += tail / len(SIGNS)
        if one < zero:
            only += (_tail(flint, law.p - 1, one) - tail) / len(SIGNS)
    if only.is_zero():
        return only
    quiet = 1 - fires
    return -(quiet**law.m) * (law.m * (-only / quiet).log1p()).expm1()


def _fewest(flint: ModuleType, law: Law, needle: float, signs: tuple[int, int, int]) -> int | None:
    """`Setting.thresholds` in exact rationals where the kernel is rational, in balls for softmax."""
    first, own, last = signs
    a, b, margin = (flint.fmpq(*Fraction(str(x)).as_integer_ratio()) for x in (needle, law.b, MARGIN))
    c = 1 - b
    least = law.p
    for rho in _ratios(flint, law, needle):
        bar = (c + margin - c * last) * (rho + law.n - 1)
        theta = (bar - rho * a * first - b * (rho + law.copies - 1) * own) / (b * law.copies)
        half = (theta + law.p - 1) / 2
        if isinstance(half, flint.fmpq):
            above = int(half.floor()) + 1
        else:
            if half > law.p or half < 0:
                above = law.p if half > law.p else 0
            else:
                whole = half.floor().unique_fmpz()
                if whole is None:
                    return None
                above = int(whole) + 1
        least = min(least, max(0, above))
    return least


def _ratios(flint: ModuleType, law: Law, needle: float) -> list:
    """Kernel ratios, exact (fmpq) or as balls, of the needle's row and of the others."""
    a = flint.fmpq(*Fraction(str(needle)).as_integer_ratio())
    if law.kernel == "softmax":
        if needle == 0:
            return [flint.fmpq(1)]
        query = Fraction(str(needle if law.aq is None else law.aq))
        s = Fraction(str(law.scale))
        exponents = (s * Fraction(str(needle)) * (1 + query), s * Fraction(str(needle)))
        return [(flint.arb(flint.fmpq(*e.as_integer_ratio())) * flint.arb(law.n).log()).exp() for e in exponents]
    if law.kernel == "linear":
        return [1 + a]
    number = Fraction(str(law.kernel[1]))
    if law.kernel[0] == "tilted":
        return [1 + a * law.n / flint.fmpq(*number.as_integer_ratio())]
    if number.denominator == 1:
        return [(1 + a) ** int(number)]
    return [flint.arb(1 + a) ** flint.arb(flint.fmpq(*number.as_integer_ratio()))]


def _tail(flint: ModuleType, count: int, least: int):
    """P(X >= least) for `count` fair tosses: the regularized incomplete beta function at 1/2."""
    if least <= 0:
        return flint.arb(1)
    if least > count:
        return flint.arb(0)
    return flint.acb(0.5).beta_lower(least, count - least + 1, 1).real
