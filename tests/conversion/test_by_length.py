"""Figures at each length, against plain arithmetic on the models' logits."""

import math

import torch

from attngap.conversion.by_length import SCORED, SEED, at_length
from attngap.conversion.calibration import FactsPassage
from attngap.conversion.choose import convert
from tests.conversion.small import TEXT
from tests.zoo import mechanisms, tiny, tokenizer

LENGTH = 1200


def test_figures_are_those_of_the_last_tokens_of_text_and_of_the_digits():
    model, words = tiny(), tokenizer()
    converted = convert(model, mechanisms(model), [(0, 1)])
    first, second = at_length({"original": model, "converted": converted}, words, TEXT, LENGTH)
    passage = FactsPassage.make(words, TEXT, context=LENGTH, seed=SEED, split="heldout")
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
