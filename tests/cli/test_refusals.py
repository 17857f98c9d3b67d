"""What is refused, is refused by the command itself in one line, with exit code 2, and leaves nothing behind."""

import json
import os
import re
import sys

import pytest
import transformers as tf
from safetensors.torch import load_file, save_file

from attngap.cli import main
from tests.conversion.small import TEXT
from tests.zoo import SHARED, tiny, tokenizer
from tests.zoo_architectures import architectures

QUICK = ("--context", "64", "--tokens", "448", "--steps", "2", "--joint", "0", "--rounds", "1", "--no-measure")
# Class to the words that say why. Each was a traceback once, or an answer about something else.
ARCHITECTURES = {
    ("causal", "BloomForCausalLM"): "does not use transformers' attention interface",
    ("causal", "DogeForCausalLM"): "computes something else than softmax over its queries and keys",
    ("causal", "Gemma2ForCausalLM"): "softcap or learned sinks",
    ("causal", "GptOssForCausalLM"): "softcap or learned sinks",
    ("causal", "MambaForCausalLM"): "has no softmax attention",
    ("causal", "MiniMaxForCausalLM"): "MiniMaxCache",
    ("causal", "ZambaForCausalLM"): "does not say which layer of the cache is its own",
    ("sequence to sequence", "BartForConditionalGeneration"): "diagnosed but not converted",
    ("sequence to sequence", "T5ForConditionalGeneration"): "diagnosed but not converted",
    (
        "image",
        "CLIPForImageClassification",
    ): "CLIPForImageClassification reads pixel_values. Only models that read text",
    ("image", "ViTForImageClassification"): "ViTForImageClassification reads pixel_values. Only models that read text",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a text and a tiny model."""
    folder = tmp_path_factory.mktemp("refusals")
    (folder / "text.txt").write_text(TEXT)
    kept(folder / "model", tiny())
    return folder


def kept(folder, model):
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def told(monkeypatch, capfd, *words) -> str:
    """What the command says last; the steps it had begun are its other lines."""
    monkeypatch.setattr(sys, "argv", ["attngap", *map(str, words)])
    capfd.readouterr()
    with pytest.raises(SystemExit) as left:
        main()
    said = capfd.readouterr()
    assert left.value.code == 2, said.err
    assert "Traceback" not in said.err + said.out
    lines = [line for line in said.err.splitlines() if line.strip()]
    assert lines[-1].startswith("attngap: ")
    assert sum(line.startswith("attngap: ") and "compiling" not in line for line in lines) == 1
    return lines[-1]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "name"), ARCHITECTURES)
def test_an_architecture_that_does_not_convert(place, tmp_path, monkeypatch, capfd, kind, name):
    (each,) = (each for each in architectures(kind) if each.class_name == name)
    model = kept(tmp_path / "model", each.build())
    said = told(monkeypatch, capfd, "linearize", model, "--text", place / "text.txt", *QUICK, "-o", tmp_path / "new")
    assert ARCHITECTURES[kind, name] in said
    assert "fitting" not in said
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("verb", ["diagnose", "linearize"])
def test_a_model_of_a_tower_for_text_and_one_for_images(place, tmp_path, monkeypatch, capfd, verb):
    """CLIP as it ships: it reads text, and only beside images."""
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    vision = {key: SHARED[key] for key in sizes}
    config = tf.CLIPConfig(text_config=SHARED, vision_config=vision | {"image_size": 32, "patch_size": 8})
    model = kept(tmp_path / "model", tf.CLIPModel(config))
    words = (verb, model, "--text", place / "text.txt", "--context", "256", "-o", tmp_path / "new")
    said = told(monkeypatch, capfd, *words)
    assert re.search(r"CLIPModel (reads text beside other things. Only models|does not run on tokens alone)", said)
    assert not (tmp_path / "new").exists()


def test_a_model_whose_layers_all_slide(place, tmp_path, monkeypatch, capfd):
    model = kept(tmp_path / "model", tiny("sliding"))
    said = told(monkeypatch, capfd, "linearize", model, "--text", place / "text.txt", *QUICK, "-o", tmp_path / "new")
    assert "No layer of this MistralForCausalLM can be replaced: it has a sliding window of 10 already" in said
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("verb", ["diagnose", "linearize", "generate"])
@pytest.mark.parametrize("how", ["without q_proj", "of other sizes", "cut", "no config", "pickled", "its own code"])
def test_a_damaged_or_dangerous_checkpoint(place, tmp_path, monkeypatch, capfd, verb, how):
    model = kept(tmp_path / "model", tiny())
    weights, config = model / "model.safetensors", model / "config.json"
    if how in ("without q_proj", "of other sizes"):
        tensors = load_file(weights)
        name = "model.layers.0.self_attn.q_proj.weight"
        tensors[name] = tensors[name][:5].clone()
        if how == "without q_proj":
            del tensors[name]
        save_file(tensors, weights, metadata={"format": "pt"})
    elif how == "cut":
        weights.write_bytes(weights.read_bytes()[:5000])
    elif how == "no config":
        config.unlink()
    elif how == "pickled":
        weights.rename(model / "pytorch_model.bin")
    else:
        own = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine", "AutoModelForCausalLM": "mine.Model"}}
        config.write_text(json.dumps(own))
    more = ["hello"] if verb == "generate" else ["-o", tmp_path / "new"]
    expected = {
        "without q_proj": "lacks 1 weights of LlamaForCausalLM, such as 'model.layers.0.self_attn.q_proj.weight'",
        "of other sizes": "'model.layers.0.self_attn.q_proj.weight': (5, 32), not (32, 32)",
        "cut": "Cannot load the model",
        "no config": "it has no config.json",
        "pickled": "--allow-pickle",
        "its own code": "--trust-remote-code",
    }[how]
    assert expected in told(monkeypatch, capfd, verb, model, *more)
    assert not (tmp_path / "new").exists()


def test_a_tokenizer_larger_than_the_vocabulary(place, tmp_path, monkeypatch, capfd):
    model = kept(tmp_path / "model", tiny())
    words = tokenizer()
    words.add_tokens([f"<{i}>" for i in range(50)])
    words.save_pretrained(model)
    for verb in ("diagnose", "linearize"):
        words = (verb, model, "--text", place / "text.txt", "--context", 256, "-o", tmp_path / "new")
        assert "tokenizer" in told(monkeypatch, capfd, *words)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--window", "-1"), "window must be at least 0, got -1"),
        (("--keep", "nan"), "keep takes a share from 0 to 1, got nan"),
        (("--steps", "-3"), "steps"),
        (("--context", "0"), "context"),
        (("--dtype", "int8"), "int8"),
        (("--device", "tpu"), "tpu"),
        (("--text", "nowhere.txt"), "nowhere.txt"),
    ],
)
def test_an_impossible_option(place, tmp_path, monkeypatch, capfd, words, expected):
    said = told(monkeypatch, capfd, "linearize", place / "model", *words, "-o", tmp_path / "new")
    assert expected in said
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("verb", ["diagnose", "linearize"])
def test_a_file_where_a_folder_should_be(place, tmp_path, monkeypatch, capfd, verb):
    (tmp_path / "mine").write_text("keep me")
    told(monkeypatch, capfd, verb, place / "model", "--text", place / "text.txt", "-o", tmp_path / "mine")
    assert (tmp_path / "mine").read_text() == "keep me"


@pytest.mark.parametrize(
    ("verb", "name"),
    [
        ("plan", "diagnosis.json"),
        ("report", "receipt.json"),
        ("eval", "attngap.json"),
        ("generate", "attngap.json"),
        ("serve", "attngap.json"),
    ],
)
@pytest.mark.parametrize("content", [b"", b"[" * 100_000, b"\xff\xfe{\x00}\x00", b'{"schema": 3}', b"null"])
def test_a_file_that_is_no_result(tmp_path, monkeypatch, capfd, verb, name, content):
    (tmp_path / name).write_bytes(content)
    more = {"generate": ["hello"], "serve": ["--model", tmp_path], "report": ["-o", tmp_path / "new.html"]}
    told(monkeypatch, capfd, verb, tmp_path, *more.get(verb, []))
    assert not (tmp_path / "new.html").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written(place, tmp_path, monkeypatch, capfd):
    (tmp_path / "locked").mkdir(mode=0o500)
    told(monkeypatch, capfd, "diagnose", place / "model", "--text", place / "text.txt", "-o", tmp_path / "locked" / "x")
