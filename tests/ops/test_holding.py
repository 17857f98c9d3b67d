"""Which tokens are held: compiled against torch, ties, numbers that are none. `test_turns` has it in plain loops."""

import pytest
import torch

from attngap.ops import native
from attngap.ops.holding import Turns, choose

COMPILED = pytest.mark.skipif(not native.available(), reason="numba is not installed")
SIZES = [  # turns, key heads, heads of a group, channels
    (Turns(2, 10, 40, 16, 2), 2, 3, 12),
    (Turns(1, 3, 5, 2, 1), 3, 1, 7),
    (Turns(0, 2, 9, 8, 1), 1, 5, 16),
    (Turns(4, 1, 3, 1, 1), 2, 4, 8),
    (Turns(4, 26, 70, 32, 4), 1, 3, 64),
]


@pytest.fixture(autouse=True)
def canaries(monkeypatch):
    monkeypatch.setenv("ATTNGAP_DEBUG_KERNELS", "1")


def drawn(sizes, count, dtype=torch.float64, seed=0):
    turns, kv, group, d = sizes
    generator = torch.Generator().manual_seed(seed)
    k = torch.randn(kv, turns.slots + (count - 1) * turns.turn + 3, d, generator=generator, dtype=dtype)
    asked = torch.randn(count, kv, group * (turns.turn // turns.every), d, generator=generator, dtype=dtype)
    return turns, k, asked


def both(*given):
    found = choose(*given)
    with native.off():
        return found, choose(*given)


@COMPILED
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("threads", [1, 2])
def test_the_compiled_form_is_that_of_torch(sizes, threads, monkeypatch):
    monkeypatch.setattr(native, "ALONE", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-4)):
        got, want = both(*drawn(sizes, 9, dtype))
        for one, other in zip(got[:3], want[:3], strict=True):
            assert torch.equal(one, other)
        torch.testing.assert_close(got.score, want.score, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kernels", [pytest.param(True, marks=COMPILED), False], ids=["compiled", "torch"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_turns_in_two_pieces_are_those_of_one(sizes, kernels):
    turns, k, asked = drawn(sizes, 8)
    with native.off() if not kernels else torch.no_grad():
        whole = choose(turns, k, asked)
        first = choose(turns, k, asked[:3])
        begin = turns.sinks + turns.held
        rest = torch.cat((k[:, : turns.sinks], _pick(k, first.after), k[:, begin + 3 * turns.turn :]), 1)
        second = choose(turns, rest, asked[3:], first.score)
    assert torch.equal(_pick(rest, second.after), _pick(k, whole.after))
    torch.testing.assert_close(second.score, whole.score)


def _pick(x, places):
    return x.gather(1, places[..., None].expand(-1, -1, x.shape[2]))


@pytest.mark.parametrize("kernels", [pytest.param(True, marks=COMPILED), False], ids=["compiled", "torch"])
def test_of_equals_the_earlier_ones_are_held(kernels):
    turns, k, asked = drawn(SIZES[0], 4)
    with native.off() if not kernels else torch.no_grad():
        found = choose(turns, torch.zeros_like(k), asked)
    first = torch.arange(turns.sinks, turns.sinks + turns.held).expand(len(k), -1)
    assert torch.equal(found.held[1], first)  # all weigh the same; the first ones were there before
    every = torch.cat((found.held, found.lost), 2)
    for turn in range(1, len(asked)):  # nothing is lost twice, and nothing appears
        assert not (found.lost[turn, 0, :, None] == found.lost[:turn, 0].flatten()).any()
    assert every.max() < k.shape[1]


@COMPILED
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_numbers_that_are_none_hold_as_many_tokens_as_others(bad):
    for sizes in SIZES:
        turns, k, asked = drawn(sizes, 6, torch.float32)
        k[:, ::5] = bad
        found = choose(turns, k, asked)
        for turn in range(6):
            for head in range(len(k)):
                before = found.held[turn, head].tolist() + list(
                    range(begin := turns.sinks + turns.held + turn * turns.turn, begin + turns.turn)
                )
                after = (found.held[turn + 1] if turn < 5 else found.after)[head].tolist()
                assert sorted(after + found.lost[turn, head].tolist()) == sorted(before)


def test_without_a_whole_turn_nothing_changes():
    turns, k, asked = drawn(SIZES[0], 4)
    found = choose(turns, k[:, :20], asked[:0])
    assert found.held.shape == (0, 2, 10)
    assert found.lost.shape == (0, 2, 16)
    assert not found.score.any()
    assert torch.equal(choose(turns, k[:, :20], asked[:0], found.score + 1).score, found.score + 1)
