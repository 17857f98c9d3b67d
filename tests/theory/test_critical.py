import math

import pytest

from attngap.errors import AttngapError
from attngap.theory import critical
from attngap.theory.separation import law

STANDARD = {"n": 2**20, "a0": 0.05, "b": 0.5, "m": 40}


def test_concentration_needle_solves_its_equation():
    for scale in (0.5, 1.0, 3.0):
        a = critical.concentration_needle(scale)
        assert scale * a * (1 + a) == pytest.approx(1.0)
        assert scale * critical.concentration_needle(scale, aq=0.3) * 1.3 == pytest.approx(1.0)


@pytest.mark.parametrize("kernel", ["softmax", ("polynomial", 16), ("tilted", 2.0)])
def test_critical_needle_reaches_the_critical_mass(kernel):
    a = critical.critical_needle(kernel, 2**20, 0.5)
    mass = law(kernel, n=2**20, d=3, a0=0.0, a1=a, b=0.5, m=1).mass.needle_row
    assert mass == pytest.approx(critical.critical_mass(a, 0.5), rel=1e-9)


def test_linear_never_gets_there_and_a_polynomial_moves_out():
    lengths = [10.0**k for k in (3, 5, 7)]
    assert all(critical.critical_needle("linear", n, 0.5) == math.inf for n in lengths)
    moved = [critical.critical_needle(("polynomial", 16), n, 0.5) for n in lengths]
    assert moved == sorted(moved)
    assert moved[-1] > 2 * moved[0]
    softmax = [critical.critical_needle("softmax", n, 0.5) for n in lengths]
    assert softmax[-1] < 0.618


def test_critical_scale_inverts_critical_needle():
    a = critical.critical_needle("softmax", 1e6, 0.5, scale=1.7)
    assert critical.critical_scale(a, 1e6, 0.5) == pytest.approx(1.7, rel=1e-6)


def test_needle_for_is_the_edge():
    a = critical.needle_for("softmax", 0.9, d=514, **STANDARD)
    assert law("softmax", d=514, a1=a, **STANDARD).success >= 0.9
    assert law("softmax", d=514, a1=a - 1e-6, **STANDARD).success < 0.9
    assert critical.needle_for("linear", 0.9, d=514, **STANDARD) == math.inf


def test_smallest_d_is_the_first_divisor_that_works():
    d = critical.smallest_d("softmax", 0.99, a1=0.7, **STANDARD)
    assert d == 514
    assert law("softmax", d=258, a1=0.7, **STANDARD).success < 0.99
    assert critical.smallest_d("linear", 0.99, a1=0.7, **STANDARD) is None


def test_divisors_are_all_and_in_order():
    assert list(critical.divisors(360)) == [k for k in range(1, 361) if 360 % k == 0]
    assert list(critical.divisors(49)) == [1, 7, 49]
    assert sum(1 for _ in critical.divisors(10**12)) == 169


def test_reach_ends_at_the_critical_surface():
    assert critical.reach(0.62, 0.5) == math.inf
    near, far = critical.reach(0.3, 0.5), critical.reach(0.5, 0.5)
    assert near < far < math.inf


def test_wanted_success_must_be_a_probability():
    with pytest.raises(AttngapError, match=r"strictly between 0 and 1, got 1\.5"):
        critical.needle_for("softmax", 1.5, d=514, **STANDARD)
