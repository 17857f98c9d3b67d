import math
from fractions import Fraction

import numpy as np
import pytest
from scipy.stats import binom

from attngap.theory.binomial import log_between, log_pmf, log_upper

flint = pytest.importorskip("flint", reason="python-flint encloses the tails")


@pytest.mark.parametrize("count", [0, 1, 2, 5, 17, 64])
def test_small_counts_equal_exact_sums(count):
    for x in range(-1, count + 3):
        exact = Fraction(sum(math.comb(count, k) for k in range(max(x, 0), count + 1)), 2**count)
        assert math.exp(log_upper(count, x)) == pytest.approx(float(exact), rel=1e-13, abs=0)
        inside = math.comb(count, x) / 2**count if 0 <= x <= count else 0.0
        assert math.exp(log_pmf(count, x)) == pytest.approx(inside, rel=1e-13, abs=0)


@pytest.mark.parametrize("count", [10**3, 10**6, 10**9, 10**12, 10**15])
@pytest.mark.parametrize("deviations", [-3, -0.1, 0, 0.3, 5, 30, 100])
def test_large_counts_lie_in_interval_enclosures(count, deviations):
    x = int(count / 2 + deviations * math.sqrt(count) / 2) + 1
    if x > count:
        pytest.skip("beyond the last atom")
    before, flint.ctx.prec = flint.ctx.prec, 256
    try:
        exact = flint.acb(0.5).beta_lower(x, count - x + 1, 1).real.log()
        error = abs(float(flint.arb(float(log_upper(count, x))) - exact))
    finally:
        flint.ctx.prec = before
    assert error < 1e-14 * max(1.0, abs(float(exact))) + 1e-14


def test_scipy_is_not_enough_here():
    # The reason for this file: underflow, and 1e-8 lost at a count of 1e15.
    assert binom.logsf(5 * 10**5 + 5 * 10**4, 10**6, 0.5) == -math.inf
    assert math.isfinite(float(log_upper(10**6, 5 * 10**5 + 5 * 10**4 + 1)))


def test_intervals_sum_and_difference_agree(monkeypatch):
    cases = [(10**6, 499_000, 501_000), (10**6, 500_500, 503_000), (10**6, 490_000, 499_900), (10**6, 0, 10**6 + 1)]
    summed = [np.logaddexp.reduce(log_pmf(n, np.arange(lo, hi))) for n, lo, hi in cases]
    monkeypatch.setattr("attngap.theory.binomial.SUMMED", 1)
    for (n, lo, hi), expected in zip(cases, summed, strict=True):
        assert log_between(n, lo, hi) == pytest.approx(expected, rel=1e-11, abs=1e-11)
    assert log_between(10, 7, 7) == -math.inf
    assert log_between(10, -5, 100) == pytest.approx(0.0, abs=1e-14)
