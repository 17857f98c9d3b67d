"""Models with states, shared keys or windows of their own, by the command line: converted, measured and asked."""

import json

import pytest
from typer.testing import CliRunner

from attngap.cli.app import app
from tests.conversion.small import TEXT
from tests.zoo import tokenizer
from tests.zoo_architectures import architectures

SMALL = ["--context", "64", "--tokens", "448", "--steps", "2", "--joint", "1", "--rounds", "1", "--window", "8"]
CLASSES = ("Qwen3Next", "Bamba", "GraniteMoeHybrid", "Jamba", "Lfm2", "NemotronH", "Gemma4", "Olmo3", "Cohere2")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CLASSES)
def test_a_receipt_is_measured_and_the_model_writes(tmp_path, name):
    (each,) = (each for each in architectures("causal") if each.class_name == f"{name}ForCausalLM")
    each.build().save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text(TEXT)
    model, text, out = (str(tmp_path / part) for part in ("model", "text.txt", "fast"))
    done = CliRunner().invoke(app, ["linearize", model, "--text", text, *SMALL, "-o", out], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    again = ["eval", out, "--text", text, "--passages", "1", "--trials", "1", "--contexts", "48"]
    assert CliRunner().invoke(app, again, catch_exceptions=False).exit_code == 0
    receipt = json.loads((tmp_path / "fast" / "receipt.json").read_text())
    assert receipt["quality"]["converted"]["perplexity_ratio"] > 0
    assert not any("could not be measured" in note for note in receipt["notes"])
    (later,) = receipt["entries"]
    assert [speed["context"] for speed in later["speed"]["converted"]] == [48]
    assert CliRunner().invoke(app, ["generate", out, "the cat", "--tokens", "3"]).exit_code == 0
