"""Figures at each length, against plain arithmetic on the models' logits."""

import math

import torch

from attngap.conversion.by_length import SCORED, at_length, repeated
from attngap.conversion.calibration import FactsPassage, seed_for
from attngap.conversion.choose import convert
from attngap.conversion.evaluate import parts_of
from attngap.heads.passages import passages, stress
from attngap.mechanisms.variants.hybrid import Hybrid
from attngap.models.mixed import mixed_heads
from tests.conversion.small import TEXT
from tests.zoo import mechanisms, tiny, tokenizer

LENGTH = 1200
PARTS = ["original", "converted", "without features", "without window"]


def test_figures_are_those_of_the_last_tokens_of_text_and_of_the_digits():
    model, words = tiny(), tokenizer()
    converted = convert(model, mechanisms(model), [(0, 1)])
    first, second = at_length({"original": model, "converted": converted}, words, TEXT, LENGTH)
    seed = seed_for(0, "receipt facts")
    hay = passages(words, TEXT, context=LENGTH, count=1, seed=seed, split="heldout")
    passage = FactsPassage.make(words, hay, seed=seed)
    with torch.no_grad():
        theirs, ours = (each(input_ids=passage.tokens).logits[0].log_softmax(-1) for each in (model, converted))
    stop = LENGTH - passage.asked
    rows = torch.arange(stop - min(SCORED, LENGTH // 2), stop - 1)
    loss = [-x[rows, passage.tokens[0, rows + 1]].mean().item() for x in (theirs, ours)]
    assert (first.perplexity_ratio, first.divergence) == (1, 0)
    assert second.perplexity_ratio is not None
    assert math.isclose(second.perplexity_ratio, math.exp(loss[1] - loss[0]), rel_tol=1e-4)
    apart = (theirs[rows].exp() * (theirs[rows] - ours[rows])).sum(-1).mean().item()
    assert second.divergence is not None
    assert math.isclose(second.divergence, apart, rel_tol=1e-3)
    guessed = theirs.argmax(-1)
    right = [float((guessed[[i - 1 for i in r]] == passage.tokens[0, list(r)]).float().mean()) for r in passage.answers]
    assert first.needle_by_depth == right


def test_every_part_of_a_conversion_is_measured_alone():
    """Each against the original's own weights with what that part leaves out masked away."""
    model, words = tiny(), tokenizer()
    converted = convert(model, mechanisms(model), [(0, 1)])
    parts = parts_of(model, converted, baselines=True)
    assert list(parts) == PARTS
    for layer, part in mixed_heads(parts["without window"]).items():
        before = mixed_heads(converted)[layer]
        assert isinstance(part.mechanism, Hybrid)
        assert isinstance(before.mechanism, Hybrid)
        assert part.keep.tolist() == before.keep.tolist()
        assert (part.mechanism.window, part.mechanism.sinks) == (1, before.mechanism.sinks)
        assert before.mechanism.window == 5
        streams = part.mechanism.read(None, *(torch.randn(1, n, 12, 8) for n in (4, 2, 2)))
        sinks = before.mechanism.sinks
        weights = part.mechanism.weights(streams)[0, 0]
        assert streams.fq is not None
        assert streams.fk is not None
        far = (streams.fq[0, 0] @ streams.fk[0, 0].mT)[11, sinks:11]
        torch.testing.assert_close(weights[11, sinks:11] / weights[11, sinks:11].sum(), far / far.sum())
    assert {mixed_heads(parts["without features"])[i].mechanism.feature_map.name for i in (0, 1)} == {"none"}
    rows = at_length(parts, words, TEXT, LENGTH)
    apart = [row.divergence for row in rows]
    assert apart[0] == 0
    assert len(set(apart)) == 4


def test_repetition_is_the_share_of_a_second_coming_that_is_predicted():
    model, words = tiny(), tokenizer()
    found = repeated(model, words, 20, seed=0)
    tokens, period = stress(words, context=42, seed=seed_for(0, "receipt repeated"), period=20)
    with torch.no_grad():
        guessed = model(input_ids=tokens).logits[0].argmax(-1)
    assert period == 20
    assert found == float((guessed[19:39] == tokens[0, 20:]).float().mean())
    row = at_length({"original": model}, words, TEXT, LENGTH, repetition=True)[0]
    assert row.repetition == repeated(model, words, LENGTH // 2 - 1, seed=0)
