"""Calibration at the length a conversion is for."""

import pytest
import torch

from attngap.conversion import long as long_module
from attngap.conversion.calibration import FactsPassage, TextParts, period_of, repeats
from attngap.conversion.choose import prune
from attngap.conversion.long import LongCalibration, fit_slices, long_enough
from attngap.conversion.slices import SliceReference
from attngap.models.positions import layer_positions
from tests.conversion.small import TEXT
from tests.zoo import mechanisms, tiny, tokenizer

LENGTH, CONTEXT, ROWS = 1200, 64, 16


def nothing(*_, **__):
    pass


@pytest.fixture
def calibrated(monkeypatch):
    monkeypatch.setattr(long_module, "ROWS", ROWS)
    model, words = tiny(), tokenizer()
    parts = mechanisms(model, map_options={"decay": True}, rotary=layer_positions(model)[0].options()["rotary"])
    short = torch.randint(5, 60, (5, CONTEXT), generator=torch.Generator().manual_seed(0))
    facts = FactsPassage.make(words, TextParts(words, TEXT, 0).long(LENGTH), seed=0).tokens
    repeated = repeats(words, context=LENGTH // 2, beyond=5, seed=0)
    found = LongCalibration(model, short, facts, repeated, heldout=2, exact=7)
    found.read(nothing)
    return model, parts, found


def test_numbers_are_stated_in_the_text_and_asked_for_at_its_end():
    words = tokenizer()
    found = FactsPassage.make(words, TextParts(words, TEXT, 0).long(LENGTH), seed=3)
    assert found.tokens.shape == (1, LENGTH)
    text, body = (words.decode(x).replace(" ", "") for x in (found.tokens[0], found.tokens[0, : -found.asked]))
    numbers = [words.decode(found.tokens[0, list(places)]).replace(" ", "") for places in found.answers]
    assert len(set(numbers)) == 8
    for number in numbers:
        assert number.isdigit()
        assert len(number) == 5
        assert body.count(number) == 1
        assert text.count(number) == 2
    order = [body.index(number) for number in numbers]
    assert order == sorted(order, reverse=True)


def test_a_repeated_passage_knows_its_period():
    tokens = repeats(tokenizer(), context=80, beyond=10, seed=0)
    period = period_of(tokens)
    assert torch.equal(tokens[0, period:], tokens[0, :-period])


def test_joint_steps_never_see_what_judges(calibrated):
    _, _, found = calibrated
    held = found.judges()
    assert len(held) == 5
    for piece in found.slices(40, seed=1):
        assert piece.stop - piece.start == ROWS
        for other in held:
            assert piece.past is not other.past or piece.stop <= other.start or other.stop <= piece.start


def test_what_a_layer_read_is_handed_out_once(calibrated):
    _, _, found = calibrated
    assert [each.q.shape[2] for each in found.seen(0)] == [LENGTH, LENGTH // 2]
    assert not found.seen(0)


def test_short_passages_read_together_are_what_each_is_alone(calibrated):
    _, _, found = calibrated
    alone = [piece.past for piece in found.judges()[:2]]
    layers = []
    found.read_short(lambda layer, seen: layers.append((layer, len(seen.q))))
    assert layers == [(0, 5), (1, 5)]
    for one, together in zip(alone, (piece.past for piece in found.judges()[:2]), strict=True):
        assert torch.equal(one.tokens, together.tokens)
        torch.testing.assert_close(one.layers[1].k, together.layers[1].k, atol=2e-3, rtol=2e-3)
        torch.testing.assert_close(one.states, together.states, atol=1e-4, rtol=1e-4)


def test_kept_heads_and_joint_steps_lower_the_divergence(calibrated):
    model, parts, found = calibrated
    reference = SliceReference(model, parts, found.judges())
    keep = prune(reference, 2, {0: 2, 1: 2}, rounds=1, advance=nothing)
    assert len(keep) == 2
    assert reference.divergence(keep).mean() < reference.divergence(frozenset()).mean()
    before, after = fit_slices(reference, keep, found.slices(6, seed=0), 6, nothing)
    assert after <= before
    assert abs(float(reference.divergence(keep).double().log().mean().exp()) - after) < 1e-4 * before


def test_slices_need_hybrids_that_hold_beyond_the_short_passages():
    model = tiny()
    assert long_enough(mechanisms(model), 8192, 1024)
    assert not long_enough(mechanisms(model), 1024, 1024)
    assert not long_enough(mechanisms(model, reach=64), 8192, 1024)
    assert not long_enough(mechanisms(model, "hedgehog"), 8192, 1024)
