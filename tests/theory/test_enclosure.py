import random
import sys

import pytest

from attngap.errors import AttngapError
from attngap.theory.checks.separation import random_law
from attngap.theory.enclosure import enclose
from attngap.theory.separation import law

pytest.importorskip("flint", reason="enclosures need python-flint")


def test_enclosures_hold_the_law():
    draw = random.Random(3)
    for _ in range(60):
        found = random_law(draw, largest_p=40)
        proof = enclose(found)
        assert proof.low * (1 - 1e-12) <= found.success <= proof.high * (1 + 1e-12)
        assert proof.width <= 1e-17


def test_a_success_of_zero_is_exactly_zero():
    proof = enclose(law("linear", n=2**20, d=514, a0=0.05, a1=0.7, b=0.5, m=40))
    assert (proof.low, proof.high, proof.width) == (0.0, 0.0, 0.0)


def test_a_wrong_value_is_outside():
    found = law("softmax", n=2**20, d=514, a0=0.05, a1=0.7, b=0.5, m=40)
    proof = enclose(found)
    assert proof.low <= found.success <= proof.high
    assert not proof.low <= found.success + 1e-14 <= proof.high
    assert proof.digits.startswith("0.99995047")


def test_without_flint_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "flint", None)
    with pytest.raises(AttngapError, match=r"certified needs the extra 'rigor'.* -m pip install .*\[rigor\]"):
        enclose(law("softmax", n=64, d=10, a0=0.0, a1=0.7, b=0.5, m=1))
