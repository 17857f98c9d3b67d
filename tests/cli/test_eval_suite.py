import json

import pytest
from typer.testing import CliRunner

from attngap.cli.app import app
from attngap.errors import AttngapError
from tests import zoo

runner = CliRunner()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("suite") / "model"
    zoo.tiny("llama").save_pretrained(place)
    words = zoo.tokenizer()
    words.eos_token = words.pad_token  # lm-evaluation-harness starts texts with it
    words.save_pretrained(place)
    return place


def run(*arguments):
    return runner.invoke(app, ["eval", *map(str, arguments)])


def test_any_model_takes_the_suite(folder):
    asked = (folder, "--suite", "needle", "--lengths", "250", "--examples", "2")
    found = json.loads(run(*asked, "--json").stdout)
    (score,) = found["scores"]
    assert (score["task"], score["length"], score["questions"]) == ("needle", 250, 2)
    assert score["low"] <= score["score"] <= score["high"]
    assert "needle" in run(*asked).stdout


def test_mistakes_are_one_line(folder):
    found = run(folder, "--suite", "nedle")
    assert isinstance(found.exception, AttngapError)
    assert str(found.exception).startswith("No long-context task 'nedle'. Did you mean 'needle'?")
    found = run(folder, "--suite", "needle", "--lengths", "many")
    assert str(found.exception) == "A list of lengths is whole numbers with commas between, got 'many'"


def test_the_harness_runs_what_is_exported(folder, tmp_path):
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed: pip install 'attngap[eval]'")
    from attngap.cli.eval import _run
    from attngap.models.load import load

    options = ("--suite", "needle", "--lengths", "250", "--examples", "3", "--export", tmp_path)
    assert run(folder, *options).stdout.strip() == f"lm_eval --include_path {tmp_path} --tasks attngap_needle_250"
    numbers = _run(*load(str(folder)), str(tmp_path / "attngap_needle_250.yaml"), None)
    assert 0 <= numbers["acc"] <= 1
