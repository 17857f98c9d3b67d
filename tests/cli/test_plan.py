"""`attngap plan`: from a diagnosis to a plan."""

import json

import pytest
from typer.testing import CliRunner

from attngap.cli.app import app
from attngap.diagnosis.diagnose import diagnose
from tests import zoo

RUNNER = CliRunner()
TEXT = " ".join(f"{i} green bottles hanging on the wall." for i in range(500))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("plan")
    options = {"context": 48, "passages": 2, "ranks": (2, 4), "window": 6, "draws": 1}
    diagnose(zoo.tiny("llama"), zoo.tokenizer(), TEXT, **options, directory=root / "out")
    return root


def test_a_plan_is_written_and_shown(place, tmp_path):
    target = tmp_path / "plan.json"
    done = RUNNER.invoke(app, ["plan", str(place / "out"), "--keep", "0.25", "-o", str(target)])
    assert done.exit_code == 0, done.output
    assert "keeps 2 of 8 heads" in done.stdout
    content = json.loads(target.read_text())
    assert len(content["keep"]) == 2
    printed = RUNNER.invoke(app, ["plan", str(place / "out"), "--keep", "0.25", "-o", str(target), "--json"])
    assert json.loads(printed.stdout) == json.loads(target.read_text())  # written anew, at a time of its own
    chosen = next(point for point in content["curve"] if point["kept"] == 2)
    expected = chosen["perplexity_ratio"]
    assert expected["low"] < expected["value"] < expected["high"]
    assert f"{expected['value']:.3f}x ({expected['low']:.3f}-{expected['high']:.3f})" in done.stdout


def test_a_diagnosis_without_joint_replacements_predicts_nothing_and_says_so(place, tmp_path):
    """As those have it that were made before there were any."""
    old = json.loads((place / "out" / "diagnosis.json").read_text())
    del old["joint"]
    (tmp_path / "diagnosis.json").write_text(json.dumps(old))
    done = RUNNER.invoke(app, ["plan", str(tmp_path), "-o", str(tmp_path / "plan.json")])
    assert "so nothing is predicted" in " ".join(done.stdout.split())
    points = json.loads((tmp_path / "plan.json").read_text())["curve"]
    assert {point["perplexity_ratio"] for point in points} == {None}


def test_a_plan_by_groups(place, tmp_path):
    target = tmp_path / "plan.json"
    run = ["plan", str(place / "out"), "--keep", "0.5", "-o", str(target), "--granularity"]
    assert RUNNER.invoke(app, [*run, "group"]).exit_code == 0
    assert json.loads(target.read_text())["granularity"] == "group"
    wrong = RUNNER.invoke(app, [*run, "layer"])
    assert "No granularity 'layer'" in str(wrong.exception)


def test_no_diagnosis_no_plan(tmp_path):
    done = RUNNER.invoke(app, ["plan", str(tmp_path), "-o", str(tmp_path / "plan.json")])
    assert "No diagnosis in" in str(done.exception)
    assert not (tmp_path / "plan.json").exists()


def test_a_model_none_of_whose_heads_can_be_replaced_is_told_so(tmp_path):
    options = {"context": 48, "passages": 2, "ranks": (2, 4), "window": 6, "draws": 1}
    diagnose(zoo.tiny("sliding"), zoo.tokenizer(), TEXT, **options, directory=tmp_path / "out")
    done = RUNNER.invoke(app, ["plan", str(tmp_path / "out"), "-o", str(tmp_path / "plan.json")])
    assert "No head of this model can be replaced. Why: attngap linearize" in done.output
    assert "diagnose again" not in done.output
