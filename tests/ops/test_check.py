"""Mistakes are named in one line: which argument, what came, what is allowed."""

import pytest
import torch

from attngap.errors import AttngapError
from attngap.ops.check import (
    check_attention,
    check_count,
    check_finite,
    check_gate,
    check_log_decay,
    check_state,
)


def tensors(**changes):
    made = {"q": torch.rand(2, 4, 5, 3), "k": torch.rand(2, 2, 5, 3), "v": torch.rand(2, 2, 5, 6), "mask": None}
    return {**made, **changes}


def test_what_is_right_passes():
    check_attention(**tensors(mask=torch.ones(2, 5, dtype=torch.bool)))
    check_attention(**tensors(mask=torch.ones(2, 5, dtype=torch.long)))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"q": torch.rand(4, 5, 3)}, r"q must have four axes \(batch, heads, time, width\), got \(4, 5, 3\)"),
        ({"k": torch.rand(2, 2, 0, 3)}, r"k is empty: got \(2, 2, 0, 3\), every axis must be at least 1"),
        ({"k": torch.rand(2, 2, 6, 3)}, r"k must have the batch and time of q \(2, 4, 5, 3\), got \(2, 2, 6, 3\)"),
        ({"v": torch.rand(1, 2, 5, 6)}, r"v must have the batch and time of q \(2, 4, 5, 3\), got \(1, 2, 5, 6\)"),
        ({"v": torch.rand(2, 4, 5, 6)}, "k and v must have the same heads, got 2 and 4"),
        ({"q": torch.rand(2, 3, 5, 3)}, "the heads of q must be a multiple of those of k and v, got 3 and 2"),
        ({"k": torch.rand(2, 2, 5, 4)}, "k must have width 3 like q, got 4"),
        ({"v": torch.rand(2, 2, 5, 6).double()}, "v has dtype float64 but q has float32: convert one of them"),
        ({"k": torch.rand(2, 2, 5, 3, device="meta")}, "k is on meta but q is on cpu: move one of them"),
        ({"q": torch.ones(2, 4, 5, 3, dtype=torch.int)}, "q has dtype int32; allowed: float64, float32, bfloat16"),
        ({"mask": torch.ones(2, 4, dtype=torch.bool)}, r"mask must be \(batch, time\) = \(2, 5\), got \(2, 4\)"),
        ({"mask": torch.zeros(2, 5)}, "mask must be bool or integer, True at real tokens, got float32"),
    ],
)
def test_attention(changes, text):
    with pytest.raises(AttngapError, match=text):
        check_attention(**tensors(**changes))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "window must be at least 1, got 0"),
        (-3, "window must be at least 1, got -3"),
        (2.5, "window must be a whole number of at least 1, got 2.5"),
        (True, "window must be a whole number of at least 1, got True"),
    ],
)
def test_count(value, text):
    with pytest.raises(AttngapError, match=text):
        check_count("window", value, 1)
    check_count("window", None, 1)


def test_gates_take_the_heads_of_q_or_k():
    q, k = torch.rand(2, 4, 5, 3), torch.rand(2, 2, 5, 3)
    for heads in (2, 4):
        check_gate("beta", torch.rand(2, heads, 5), q, k, vector=False)
        check_log_decay(-torch.rand(2, heads, 5, 3), q, k)
    with pytest.raises(AttngapError, match=r"beta must be \(2, 4, 5\) or \(2, 2, 5\), got \(2, 4, 5, 3\)"):
        check_gate("beta", torch.rand(2, 4, 5, 3), q, k, vector=False)
    with pytest.raises(AttngapError, match="log_decay has dtype float64; allowed with this q: float32"):
        check_log_decay(-torch.rand(2, 4, 5).double(), q, k)


@pytest.mark.parametrize("worst", [0.1, torch.nan, -torch.inf])
def test_log_decay_is_a_logarithm(worst):
    log_decay = -torch.rand(2, 4, 5)
    log_decay[1, 2, 3] = worst
    with pytest.raises(AttngapError, match="log_decay must be finite and at most 0"):
        check_log_decay(log_decay, torch.rand(2, 4, 5, 3), torch.rand(2, 2, 5, 3))


def test_state():
    q, k = torch.rand(2, 4, 5, 3).bfloat16(), torch.rand(2, 2, 5, 3).bfloat16()
    check_state({"S": torch.rand(2, 2, 3, 6)}, {"S": (3, 6)}, q, k)
    with pytest.raises(AttngapError, match="state must hold S, got nothing"):
        check_state({}, {"S": (3, 6)}, q, k)
    with pytest.raises(
        AttngapError, match=r"state\['S'\] must be \(2, 4, 3, 6\) or \(2, 2, 3, 6\), got \(2, 3, 3, 6\)"
    ):
        check_state({"S": torch.rand(2, 3, 3, 6)}, {"S": (3, 6)}, q, k)
    with pytest.raises(AttngapError, match=r"state\['S'\] must be float32 for bfloat16 inputs, got bfloat16"):
        check_state({"S": torch.rand(2, 2, 3, 6).bfloat16()}, {"S": (3, 6)}, q, k)


def test_finite_names_the_input_at_fault():
    fine, broken = torch.rand(3), torch.tensor([1.0, torch.nan])
    check_finite({"out": fine}, {"q": broken})  # inputs are looked at only when a result is broken
    with pytest.raises(AttngapError, match="v holds NaN; every input must be finite"):
        check_finite({"out": broken}, {"q": fine, "gate": None, "v": broken})
    with pytest.raises(AttngapError, match="k holds infinite values"):
        check_finite({"out": broken}, {"q": fine, "k": torch.tensor([torch.inf])})
    with pytest.raises(AttngapError, match=r"overflowed although the inputs are finite \(\|q\| <= 2e\+30\)"):
        check_finite({"out": broken}, {"q": torch.tensor([-2e30])})


def test_a_sum_that_overflows_is_no_fault():
    large = torch.full((4,), 3e38)
    assert large.sum().isinf()
    check_finite({"out": large}, {"q": large})
