import pytest

import attngap
from attngap.conversion.receipt import CONVERTED, ORIGINAL, WINDOW
from attngap.ops import native
from tests.conversion.small import TEXT, world
from tests.zoo import tiny

QUICK = {"context": 64, "tokens": 256, "steps": 2, "joint": 1, "rounds": 0, "measured": False, "quiet": True}
FEW = attngap.Measures(passages=1, trials=1)


@pytest.fixture(scope="module")
def pair():
    model, words, plan = world()
    converted, receipt = attngap.linearize(model, words, plan, TEXT, **QUICK)
    return model, converted, words, receipt


def test_a_receipt_of_a_model_that_was_not_measured(pair):
    model, converted, words, before = pair
    assert before.quality == {}
    receipt = attngap.evaluate(model, converted, words, TEXT, lengths=(48, 96), contexts=(64,), measures=FEW)
    assert isinstance(receipt, attngap.Receipt)
    assert (receipt.kept, receipt.heads, receipt.keep) == (before.kept, before.heads, before.keep)
    assert receipt.quality[ORIGINAL].perplexity_ratio == 1.0
    assert receipt.quality[CONVERTED].divergence > 0
    assert WINDOW in receipt.quality
    assert {place.split("@")[0] for place in receipt.quality[CONVERTED].needle_by_place} == {"48", "96"}
    assert [speed.context for speed in receipt.speed[CONVERTED]] == [64]
    assert "passages of 96 tokens" in receipt._repr_html_()
    name = native.name() if native.available() else "torch"
    assert receipt.provenance["far_part"] == before.provenance["far_part"] == name
    assert f"Far keys are read by {name}" in receipt._repr_html_()


def test_another_original_is_refused(pair):
    _, converted, words, _ = pair
    other = tiny()
    other.lm_head.weight.data.add_(1.0)
    with pytest.raises(attngap.AttngapError, match="the original is not the model that this one was converted from"):
        attngap.evaluate(other, converted, words, TEXT, measures=FEW)
    with pytest.raises(attngap.AttngapError, match="was not converted by attngap"):
        attngap.evaluate(other, other, words, TEXT, measures=FEW)


def test_no_lengths_are_refused(pair):
    model, converted, words, _ = pair
    with pytest.raises(attngap.AttngapError, match="lengths needs at least one length"):
        attngap.evaluate(model, converted, words, TEXT, lengths=())
