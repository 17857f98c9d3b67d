import itertools
import math

import numpy as np
import pytest
import torch

from attngap.errors import AttngapError
from attngap.theory.datasets import mixed, outputs_sum
from attngap.theory.distribution import distribution
from attngap.theory.separation import law

SMALL = {"n": 24, "d": 8, "a0": 0.05, "a1": 0.8, "b": 0.5}


def all_readouts(found, which):
    """sum_i phi(z_i) for every sign vector, by explicit matrices."""
    needle = found.a1 if which else found.a0
    signs = torch.tensor(list(itertools.product((1.0, -1.0), repeat=found.d)), dtype=torch.float64).mT
    outputs = mixed(found.kernel, found.n, found.d, needle, found.b, 5)
    return outputs_sum(outputs, signs, found.b).numpy()


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("kernel", ["softmax", "linear"])
def test_one_readout_equals_enumeration(kernel, which):
    found = law(kernel, **SMALL, m=1)
    values = all_readouts(found, which)
    got = distribution(found, which)
    assert got.mean == pytest.approx(values.mean(), rel=1e-10)
    assert got.variance == pytest.approx(values.var(), rel=1e-9)
    assert got.zero == pytest.approx((values == 0).mean(), abs=1e-12)
    for x in got.grid[:: len(got.grid) // 40]:
        i = np.searchsorted(got.grid, x)
        assert got.low[i] - 1e-9 <= (values <= x + 1e-9).mean() <= got.high[i] + 1e-9 or abs(values - x).min() < 1e-6


def test_sums_of_readouts_are_bracketed():
    found = law("softmax", **SMALL, m=4)
    got = distribution(found, 1)
    one = all_readouts(found, 1)
    sampled = np.random.default_rng(0).choice(one, size=(20000, 4)).sum(1)
    assert got.mean == pytest.approx(4 * one.mean(), rel=1e-10)
    for quantile in (0.3, 0.6, 0.9):
        x = np.quantile(sampled, quantile) + 0.01
        i = np.searchsorted(got.grid, x)
        assert got.low[i - 1] - 0.02 <= (sampled <= x).mean() <= got.high[i] + 0.02
    assert got.zero == pytest.approx(math.exp(4 * math.log1p(-found.q1)))
    assert (np.diff(got.low) >= -1e-12).all()
    assert (got.low <= got.high + 1e-12).all()


def test_a_readout_that_never_fires():
    found = law("softmax", n=60, d=8, a0=0.0, a1=2.0, b=0.1, m=3)
    assert distribution(found, 0).zero == 1.0
    assert distribution(found, 0).mean == 0.0


def test_limits_are_stated():
    with pytest.raises(AttngapError, match="points must exceed 2 m = 200, got 64"):
        distribution(law("softmax", **SMALL, m=100), 1, points=64)
    with pytest.raises(AttngapError, match="atoms; take a smaller d"):
        distribution(law("softmax", n=10**9, d=10**9 + 2, a0=0.0, a1=0.7, b=0.5, m=1), 1)
