"""Plans survive a round trip and refuse what does not fit."""

import json

import pytest
import torch

from attngap.errors import AttngapError
from attngap.mechanisms.catalogue import mechanism
from attngap.models.plan import ModelFacts, Plan, Point, Replacement, architecture, fingerprint
from tests import zoo


def facts(**changes):
    base = {"name": "tiny", "architecture": "LlamaForCausalLM", "fingerprint": "0" * 16}
    return ModelFacts(**base | {"layers": 2, "heads": 4, "kv_heads": 2} | changes)


def plan(**changes):
    curve = (Point(kept=8, text=0.0, recall=0.0), Point(kept=0, text=0.5, recall=0.25))
    return Plan(**{"model": facts(), "keep": ((0, 1), (1, 3)), "curve": curve} | changes)


def test_round_trip(tmp_path):
    made = plan()
    made.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == made
    content = json.loads((tmp_path / "plan.json").read_text())
    assert content["schema"] == "attngap.plan/1"
    assert content["keep"] == [[0, 1], [1, 3]]
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_replaced_is_every_other_head():
    assert plan().replaced() == [(0, 0), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2)]


def test_replacement_options_make_a_hybrid():
    made = mechanism("hybrid", heads=4, dim=8, kv_heads=2, **Replacement(window=5, features=12).options())
    assert made.window == 5
    assert made.feature_map.width == 12


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": "attngap.plan/9"}, "schema 'attngap.plan/9', expected 'attngap.plan/1'"),
        ({"heads_to_keep": []}, "wrong at 'heads_to_keep': Extra inputs are not permitted"),
        ({"keep": [[0, 9]]}, r"keeps head 0\.9, but the model has layers 0-1 and heads 0-3"),
        ({"keep": [[0, 1], [0, 1]]}, "keeps a head twice"),
        ({"keep": [[0]]}, r"wrong at 'keep\.0\.1'"),
        ({"granularity": "layer"}, "wrong at 'granularity'"),
    ],
)
def test_a_wrong_plan_is_refused(tmp_path, change, message):
    content = json.loads(plan().model_dump_json(by_alias=True)) | change
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(content))
    with pytest.raises(AttngapError, match=message):
        Plan.load(path)


def test_a_missing_or_broken_file_is_refused(tmp_path):
    with pytest.raises(AttngapError, match="Cannot read the plan"):
        Plan.load(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(AttngapError, match="is not JSON"):
        Plan.load(tmp_path / "bad.json")
    with pytest.raises(AttngapError, match="Cannot write '"):
        plan().save(tmp_path / "no" / "plan.json")


def test_a_plan_for_other_weights_is_refused():
    model = zoo.tiny("llama")
    own = plan(model=facts(architecture=architecture(model), fingerprint=fingerprint(model)))
    own.check(model)
    own.check(model.to(torch.bfloat16))  # the dtype does not matter
    with pytest.raises(AttngapError, match="is for LlamaForCausalLM, the model is GPT2LMHeadModel"):
        own.check(zoo.tiny("gpt2"))
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    with pytest.raises(AttngapError, match="made for other weights"):
        own.check(model)
