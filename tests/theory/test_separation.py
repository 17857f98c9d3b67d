import itertools
import math
import random
from fractions import Fraction

import pytest

from attngap.errors import AttngapError
from attngap.theory.checks.separation import random_law
from attngap.theory.critical import critical_needle, least_dimension
from attngap.theory.enclosure import enclose
from attngap.theory.montecarlo import enumerate_signs, estimate
from attngap.theory.separation import law

GOLDEN = (math.sqrt(5) - 1) / 2
STANDARD = {"n": 2**20, "d": 514, "a0": 0.05, "a1": 0.7, "b": 0.5, "m": 40}


def test_law_equals_enumeration_in_400_settings():
    draw = random.Random(7)
    for _ in range(400):
        found = random_law(draw, largest_p=6)
        counted = enumerate_signs(found, draw.randrange(found.n))
        assert counted == tuple(round(q * 2**found.d, 6) for q in (found.q0, found.q1, found.q01)), found
        q0, _, q01 = (Fraction(x, 2**found.d) for x in counted)
        success = (1 - q0) ** found.m - (1 - q01) ** found.m
        assert found.success == pytest.approx(float(success), rel=1e-12, abs=1e-300)
        assert found.failure == pytest.approx(float(1 - success), rel=1e-12, abs=1e-300)


def test_enumeration_notices_a_wrong_law():
    # Negative control: the same count against the law of a slightly different needle.
    found = law("softmax", n=36, d=8, a0=0.0, a1=0.6, b=0.5, m=5)
    wrong = law("softmax", n=36, d=8, a0=0.0, a1=0.9, b=0.5, m=5)
    assert enumerate_signs(found)[1] != round(wrong.q1 * 2**8)


@pytest.mark.parametrize(
    ("kernel", "n", "d", "a1", "m"),
    [
        ("softmax", 512, 66, 0.45, 10),
        (("tilted", 2.0), 1024, 66, 0.3, 8),
        (("polynomial", 12), 1024, 130, 0.8, 10),
        ("softmax", 4096, 130, 0.5, 12),
    ],
)
def test_law_agrees_with_monte_carlo(kernel, n, d, a1, m):
    found = law(kernel, n=n, d=d, a0=0.05, a1=a1, b=0.5, m=m)
    trials = 600 if n < 4096 else 150
    sampled = estimate(found, trials=trials, seed=1, confidence=0.999)
    assert sampled["success"].covers(found.success)
    assert sampled["fires0"].covers(math.exp(found.log_positive(0)))
    assert sampled["fires1"].covers(math.exp(found.log_positive(1)))
    assert sampled["success"].trials == trials


def test_monte_carlo_notices_a_wrong_law():
    found = law("softmax", n=512, d=66, a0=0.05, a1=0.45, b=0.5, m=10)
    other = law("softmax", n=512, d=66, a0=0.05, a1=0.9, b=0.5, m=10)
    assert not estimate(found, trials=600)["success"].covers(other.success)


def test_golden_ratio_is_approached_like_one_over_log_n():
    gaps = []
    for k in (3, 6, 9, 12, 15):
        n = 10.0**k
        needle = critical_needle("softmax", n, 0.5)
        needed = 0.1 / (needle + 0.5)
        assert needle * (1 + needle) == pytest.approx(1 + math.log(needed / (1 - needed)) / math.log(n), rel=1e-3)
        gaps.append((GOLDEN - needle) * math.log(n))
    assert [round(critical_needle("softmax", 10.0**k, 0.5), 3) for k in (3, 6, 12)] == [0.468, 0.543, 0.58]
    assert max(gaps) / min(gaps) < 1.02  # gap times log n is constant
    assert not max(gaps) / min(gaps) < 1.0001


@pytest.mark.parametrize("k", [3, 6, 9, 12, 15])
def test_weight_at_the_golden_ratio_is_one_half(k):
    mass = law("softmax", n=10**k, d=12, a0=0.0, a1=GOLDEN, b=0.5, m=1).mass
    assert mass.needle_row == pytest.approx(0.5, rel=10.0**-k * 2 + 1e-12)
    assert mass.other_rows < 0.08


def test_counterexample_weight_separates_where_ones_do_not():
    plain, tilted, softmax = (law(kernel, **STANDARD).success for kernel in ("linear", ("tilted", 2.0), "softmax"))
    assert plain == 0.0
    assert tilted == pytest.approx(0.995, abs=5e-4)
    assert softmax > 0.9999


def test_small_dimension_fails_where_predicted():
    for m, b in ((40, 0.5), (10, 0.3), (200, 0.7)):
        needed = least_dimension(b, m, 0.01)
        powers = [2**k + 2 for k in range(2, 14)]
        success = {d: law("softmax", n=2**20, d=d, a0=0.0, a1=0.9, b=b, m=m).success for d in powers}
        first = min(d for d in powers if success[d] > 0.98 * max(success.values()))
        assert needed / 2.5 < first < 2.5 * needed
        assert success[6] < 0.5


def test_more_readouts_hurt_eventually():
    few, best, many = (law("softmax", **(STANDARD | {"m": m})).success for m in (2, 27, 10**6))
    assert few < best > many
    assert law("softmax", **STANDARD).best_m == 27


def test_best_m_at_the_edges():
    assert law("linear", **STANDARD).best_m == 1  # D1 adds nothing
    quiet = law("softmax", n=60, d=8, a0=0.0, a1=2.0, b=0.1, m=3)
    assert quiet.q0 == 0.0
    assert quiet.best_m == math.inf


def test_ties_do_not_fire():
    # a0 = 0: all p signs weigh b/p, and S = 2 meets 0.1 p / b = 2 exactly. Counted in exact rationals.
    found = law("softmax", n=20, d=12, a0=0.0, a1=0.5, b=0.5, m=1)
    fires = 0
    for signs in itertools.product((1, -1), repeat=11):
        z = Fraction(1, 2) * signs[0] + Fraction(1, 20) * sum(signs[1:])
        fires += z > Fraction(6, 10)
    assert found.q0 * 2**11 == pytest.approx(fires, abs=1e-9)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"n": 10**15, "d": 10**6 + 2},
        {"n": 10**15, "d": 66, "a1": 0.4},  # success near 0
        {"n": 2**40, "d": 2**14 + 2, "m": 3},
        {"a1": 0.052, "d": 66},  # D1 hardly differs
        {"scale": 3.0, "aq": 0.2},
    ],
)
@pytest.mark.parametrize("kernel", ["softmax", ("polynomial", 20), ("tilted", 2.0)])
def test_success_and_failure_keep_relative_precision(kernel, changes):
    found = law(kernel, **(STANDARD | changes))
    proof = enclose(found)
    assert found.success == pytest.approx(proof.low, rel=1e-11, abs=0)
    assert proof.low <= proof.high
    assert found.failure == pytest.approx(1 - proof.low, rel=1e-9, abs=1e-15)


def test_logarithms_go_on_where_doubles_end():
    found = law("softmax", n=10**15, d=10**6 + 2, a0=0.05, a1=0.7, b=0.5, m=40)
    assert found.q0 == 0.0
    assert found.log_q0 == pytest.approx(-20142.36, rel=1e-6)
    assert found.success < 1.0
    assert found.failure == pytest.approx(6.8422776e-09, rel=1e-6)


def test_cross_attention_has_its_own_critical_surface():
    above, below = (
        law("softmax", n=10**15, d=12, a0=0.0, a1=a, b=0.5, m=1, aq=0.25).mass.needle_row for a in (0.85, 0.75)
    )
    assert above > 0.88
    assert below < 0.12
    # the queries' needle does not help a kernel that is a power of the score
    one, other = (law(("polynomial", 3), **STANDARD, aq=aq).mass for aq in (None, 0.9))
    assert one == other


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n": 10**6}, r"n must be a multiple of d - 2 = 512, got 1000000. Nearest: 999936 or 1000448"),
        ({"n": 100}, r"n must be a multiple of d - 2 = 512, got 100. Nearest: 512"),
        ({"n": 512 * 2**41}, "n must be at most 1e15"),
        ({"n": 1024.5}, "n must be a whole number, got 1024.5"),
        ({"d": 2}, "d must be a whole number of at least 3, got 2"),
        ({"m": 0}, "m must be a whole number of at least 1, got 0"),
        ({"c": 0.4}, "b \\+ c must be 1, got b=0.5 and c=0.4"),
        ({"b": 0.95}, "b and c = 1 - b must both be at least 0.1, got b=0.95 and c=0.05"),
        ({"a0": 0.8}, "needles must satisfy 0 <= a0 < a1, got a0=0.8, a1=0.7"),
        ({"a1": float("nan")}, "needles must satisfy"),
        ({"scale": 0.0}, "scale must be positive, got 0.0"),
        ({"aq": -1.0}, "aq, the needle of the queries, must be at least 0, got -1.0"),
        ({"kernel": "sofmax"}, "No kernel 'sofmax'. Did you mean 'softmax'"),
        ({"kernel": ("polynomial", -1)}, "kernel 'polynomial' needs a positive degree"),
        ({"kernel": ("softmax", 2)}, "kernel 'softmax' takes no number, got 2"),
    ],
)
def test_bad_settings_are_refused_in_one_line(changes, message):
    options = {"kernel": "softmax", **STANDARD, **changes}
    with pytest.raises(AttngapError, match=message) as caught:
        law(**options)
    assert "\n" not in str(caught.value)
