"""Passages that a conversion is fitted to."""

import random
import string

import pytest
import torch

from attngap.conversion.calibration import TextParts, repeats, seed_for
from attngap.conversion.material import Material
from attngap.conversion.options import ConversionOptions
from attngap.errors import AttngapError
from attngap.storage.checkpoint import open_checkpoint
from tests.zoo import tiny, tokenizer

WORDS = "".join(random.Random(0).choices(string.ascii_letters + "    ", k=9000))
TRACE = 12  # characters that say where a passage of random letters comes from


@pytest.mark.parametrize(("context", "beyond"), [(64, 8), (64, 20), (64, 100), (50, 3)])
def test_repeats_come_from_beyond_the_window_where_there_is_room(context, beyond):
    for seed in range(8):
        tokens = repeats(tokenizer(), context=context, beyond=beyond, seed=seed)[0]
        assert len(tokens) == context
        periods = [p for p in range(2, context // 2 + 1) if torch.equal(tokens[p:], tokens[:-p])]
        assert periods
        assert periods[0] > min(beyond, context // 2 - 1)


def traces(tokens):
    """Of every passage."""
    rows = [tuple(row) for row in tokens.tolist()]
    return {row[i : i + TRACE] for row in rows for i in range(len(row) - TRACE)}


def drawn(seed, **changes):
    options = ConversionOptions(context=64, tokens=64 * 60, window=8, seed=seed, joint=80, **changes)
    with open_checkpoint(None, {}) as checkpoint:
        return Material.draw(tiny(), tokenizer(), WORDS, options, checkpoint, long=1200)


def test_nothing_that_judges_is_fitted_to_however_many_passages_there_are():
    for seed in range(3):
        made = drawn(seed, keep=None, max_ppl_ratio=1.02, max_ppl_length=128)
        assert len(made.short) == 60
        assert made.targets.shape == (2, 128)
        purposes = [made.short[: -made.heldout], made.judging(recall=True), made.targets, made.facts, made.repeated]
        found = [traces(tokens) for tokens in purposes]
        for i, one in enumerate(found):
            assert not any(one & other for other in found[i + 1 :])
        joint = made.joint(recall=True)
        assert not traces(joint) & (found[1] | found[2])


def test_no_two_purposes_share_a_seed():
    roles = ("repeated", "joint repeated", "judging repeated", "receipt induction", "receipt needle", "receipt facts")
    found = {seed_for(seed, role, i) for seed in range(20) for role in roles for i in range(200)}
    assert len(found) == 20 * len(roles) * 200


def test_a_short_text_is_cut_twice_to_be_fitted_to_but_never_to_judge():
    parts = TextParts(tokenizer(), WORDS[:1600], 0)  # of which three quarters calibrate
    judge, long = parts.judging(64), parts.long(1000)
    short = parts.short(64, 10)
    assert traces(short) & traces(long)
    assert not traces(judge) & (traces(short) | traces(long))
    with pytest.raises(AttngapError, match=r"The text is too short: .* tokens are left to fit to, room for"):
        parts.short(64, 40)
    with pytest.raises(AttngapError, match="a passage of 500 is wanted"):
        parts.judging(500)
