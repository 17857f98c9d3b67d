"""Tokens that are held of a prompt, against a search that tries every one of them."""

import itertools

import pytest
import torch

from attngap.mechanisms.most_missed import most_missed
from tests.mechanisms.test_held import KV, LLAMA, WINDOW, H, angles, cut, made, streams

PROMPT = 20


def errors(found, x, rotary):
    """|weight - softmax weight|^2 |v|^2 of each token, over all of the last rows of each key head's queries."""
    q, k, v = x
    read = found.read(None, *x, rotary=rotary)
    softmax = (q @ k.repeat_interleave(H // KV, 1).mT * found.scale).masked_fill(
        ~torch.ones(PROMPT, PROMPT, dtype=torch.bool).tril(), -torch.inf
    )
    missed = (softmax.softmax(-1) - found.weights(read)).square()[:, :, -8:].sum(2)  # (b, h, t)
    return missed.unflatten(1, (KV, -1)).sum(2) * v.square().sum(-1)


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("layout", [None, LLAMA])
def test_they_are_those_whose_weights_are_most_wrong(relative, layout):
    found, x = made(layout, relative=relative), streams(PROMPT)
    rotary = None if layout is None else angles(PROMPT, 6)
    want = errors(found, x, rotary).detach()
    tokens = most_missed(found, x[0][:, :, -8:], *x[1:], rotary, 4)
    assert tokens.shape == (3, KV, 4)
    for i, head in itertools.product(range(3), range(KV)):
        far = sorted(range(found.sinks, PROMPT - WINDOW), key=lambda j: -float(want[i, head, j]))
        assert tokens[i, head].tolist() == sorted(far[:4])


def test_beyond_its_reach_features_hold_nothing():
    """So that what softmax reads most is missed most."""
    found, x = made(reach=10), streams(PROMPT)
    near = made(map_options={"features": 19})
    with torch.no_grad():
        near.log_gain.fill_(-60.0)
        near.gain_weight.zero_()
    given = (x[0][:, :, -8:], *x[1:], None, 3)
    assert torch.equal(most_missed(found, *given), most_missed(near, *given))
    assert not torch.equal(most_missed(found, *given), most_missed(made(), *given))


def test_a_short_prompt_has_few_or_none():
    found, x = made(), streams(PROMPT)
    few = cut(x, 0, WINDOW + 4)
    assert most_missed(found, *few, None, 9).tolist() == [[[2, 3]] * KV] * 3
    assert most_missed(found, *cut(x, 0, 4), None, 9).shape == (3, KV, 0)
