"""From a config's folder to figures, with a real rehearsal on small sizes."""

import json

import pytest
import transformers as tf
from typer.testing import CliRunner

from attngap.cli.app import app
from attngap.costs import rehearsal
from attngap.errors import AttngapError
from tests import zoo

RUNNER = CliRunner()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTNGAP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(rehearsal, "text_of", lambda _: None)
    zoo.DECODERS["llama"][1].save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def test_a_folder_with_a_config_alone_is_enough(folder):
    small = ["--context", "160", "--length", "160"]
    done = RUNNER.invoke(app, ["estimate", folder, "--json", *small])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["parameters"] == sum(p.numel() for p in zoo.tiny("llama").parameters())
    for verb in ("diagnose", "linearize"):
        assert found[verb]["seconds"] > 0
        assert found[verb]["memory"] > found["weights"]
        assert found["options"][verb]["context"] == 160
    shown = RUNNER.invoke(app, ["estimate", folder, *small])  # remembered by now
    assert shown.exit_code == 0, shown.output
    assert "beyond the weights" in shown.stdout
    assert "rehearsing" not in shown.output


def test_a_folder_without_a_config(tmp_path):
    done = RUNNER.invoke(app, ["estimate", str(tmp_path)])
    assert isinstance(done.exception, AttngapError)
    assert "it has no config.json" in str(done.exception)


def test_a_model_that_reads_images_is_not_sent_to_a_diagnosis(tmp_path):
    tf.ViTConfig(architectures=["ViTForImageClassification"]).save_pretrained(tmp_path)
    done = RUNNER.invoke(app, ["estimate", str(tmp_path)])
    assert isinstance(done.exception, AttngapError)
    assert str(done.exception).startswith("ViTForImageClassification reads pixel_values. Only models that read text")
