"""A base with the same weights and another config is another model."""

import json

import pytest
import torch
import transformers as tf

import attngap
from attngap.errors import AttngapError
from attngap.models.save import read_record
from attngap.models.settings import changed, settings
from tests.trust.files import TOKENS, converted
from tests.zoo import tiny


@pytest.fixture
def folder(tmp_path):
    return converted(tmp_path)


def edit(folder, **changes):
    path = folder / "base" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rms_norm_eps": 0.1}, "rms_norm_eps was 1e-06, is 0.1"),
        ({"hidden_act": "gelu"}, "hidden_act was 'silu', is 'gelu'"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}, "rope_theta was 10000.0, is 5.0"),
    ],
)
def test_a_setting_that_changes_what_is_computed_is_refused_by_name(folder, changes, words):
    with torch.no_grad():
        before = attngap.load(folder)[0](TOKENS).logits
    edit(folder, **changes)
    with pytest.raises(AttngapError, match="with another config") as error:
        attngap.load(folder)
    assert words in str(error.value)
    with torch.no_grad():  # it would have been another model: the weights alone do not tell
        assert not torch.equal(attngap.load(folder / "base")[0](TOKENS).logits, before)


def test_bookkeeping_may_change(folder):
    edit(folder, use_cache=False, bos_token_id=7, transformers_version="5.99", attention_dropout=0.5, brand_new=3)
    attngap.load(folder)


def test_a_record_of_before_has_no_settings_and_loads(folder):
    path = folder / "attngap.json"
    record = json.loads(path.read_text())
    assert record["base"].pop("config")["rms_norm_eps"] == 1e-6
    path.write_text(json.dumps(record))
    with pytest.raises(AttngapError, match="was changed after it was written"):  # taken out by hand
        attngap.load(folder)
    whole = read_record(converted(folder / "again"))
    older = whole.model_copy(update={"base": whole.base.model_copy(update={"config": {}})}).sealed(whole.adapter)
    written = json.loads(older.model_dump_json(by_alias=True))
    del written["base"]["config"]
    (folder / "again" / "attngap.json").write_text(json.dumps(written))
    attngap.load(folder / "again")


def test_parts_of_a_config_are_looked_into():
    config = tf.Gemma3Config()
    recorded = settings(config)
    assert changed(recorded, config) is None
    config.text_config.rms_norm_eps = 0.5
    assert changed(recorded, config) == "text_config.rms_norm_eps was 1e-06, is 0.5"


@pytest.mark.parametrize(("was", "now"), [(10, None), (None, 10)])
def test_a_setting_that_is_taken_out_or_put_in_counts(was, now):
    recorded = json.loads(json.dumps(settings(tf.MistralConfig(sliding_window=was))))
    assert changed(recorded, tf.MistralConfig(sliding_window=was)) is None
    assert changed(recorded, tf.MistralConfig(sliding_window=now)) == f"sliding_window was {was}, is {now}"


def test_what_does_not_read_back_as_itself_is_not_recorded():
    class Odd(tf.LlamaConfig):
        @classmethod
        def from_dict(cls, config_dict, **kwargs):
            return super().from_dict(config_dict | {"rms_norm_eps": 0.25}, **kwargs)

    found = settings(Odd(**tiny().config.to_dict()))
    assert "rms_norm_eps" not in found
    assert found["hidden_act"] == "silu"
