import json

import pytest
from typer.testing import CliRunner

import attngap
from attngap import catalogue
from attngap.benchmark import measure
from attngap.cli import bench as module
from attngap.cli.app import app
from attngap.conversion.evaluate import Measures
from attngap.conversion.linearize import linearize
from tests.conversion.small import TEXT, plan
from tests.zoo import tiny, tokenizer

RUNNER = CliRunner(env={"COLUMNS": "80", "TERM": "dumb"})


@pytest.fixture(scope="module")
def records():
    """One real run on lengths that take no time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "QUICK", (64,))
        patch.setattr(module, "QUICK_MECHANISMS", (32, 64))
        patch.setattr(measure, "ENOUGH", 1)
        done = RUNNER.invoke(app, ["bench", "--quick", "--json"], catch_exceptions=False)
    assert done.exit_code == 0
    return json.loads(done.stdout)


def test_json_names_every_op_and_mechanism(records):
    assert {r["op"] for r in records} == {"linear", "delta", "hybrid", "mechanism", "crossover"}
    assert {r["form"] for r in records if r["op"] == "crossover"} == set(catalogue())
    expanded = {r["op"] for r in records if r["direction"] == "forward+backward, expanded gradient"}
    assert expanded == {"linear"}


def test_table_fits_80_columns(records, monkeypatch):
    slow = [{**r, "milliseconds": 1234.5} if r.get("implementation") == "attngap" else r for r in records]
    monkeypatch.setattr(module, "measure", lambda quick: slow)
    done = RUNNER.invoke(app, ["bench"], catch_exceptions=False)
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)
    shown = done.stdout
    assert all(name in shown for name in catalogue())
    assert "vectorized torch" in shown


def test_missing_peers_are_named(records, monkeypatch):
    gone = [{**r, "missing": "not installed"} if r["implementation"] == "fast-transformers" else r for r in records]
    monkeypatch.setattr(module, "measure", lambda quick: gone)
    done = RUNNER.invoke(app, ["bench"], catch_exceptions=False)
    assert "fast-transformers: not installed" in done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A converted model of two layers beside its original."""
    base, converted = tmp_path_factory.mktemp("base"), tmp_path_factory.mktemp("converted")
    tiny().save_pretrained(base)
    tokenizer().save_pretrained(base)
    model, words = attngap.load(base)
    made = plan(model)
    made = made.model_copy(update={"model": made.model.model_copy(update={"name": str(base)})})
    quick = {"context": 64, "tokens": 256, "steps": 1, "joint": 0, "rounds": 0}
    measures = Measures(passages=1, trials=0, contexts=(), baselines=False)
    attngap.save(linearize(model, words, made, TEXT, measures=measures, **quick)[0], converted, tokenizer=words)
    return converted


def test_a_converted_folder_is_measured_beside_its_original(folder):
    done = RUNNER.invoke(app, ["bench", str(folder), "--contexts", "40", "--prompts", "30,50", "--json"])
    assert done.exit_code == 0, done.output
    weights, decode, *prompts = json.loads(done.stdout)
    assert weights["what"] == "weights"
    assert weights["mb"] > 0
    assert (decode["what"], decode["n"]) == ("decode", 40)
    assert [(each["what"], each["n"]) for each in prompts] == [("prefill", 30), ("prefill", 50)]
    for record in (decode, *prompts):
        taken = record["milliseconds"]
        assert record["times_as_fast"] == pytest.approx(taken["original"] / taken["converted"])
    assert decode["cache_mb"].keys() == {"original", "converted", module.COMPILED}
    assert "times_as_fast_at_most" not in decode
    for record in prompts:
        taken = record["milliseconds"]
        assert taken.keys() == {"original", "converted", module.COMPILED, "without attention"}
        assert record["times_as_fast_at_most"] == pytest.approx(taken["original"] / taken["without attention"])


def test_the_table_of_a_folder_fits_and_says_what_could_be_gained_at_most(folder):
    done = RUNNER.invoke(app, ["bench", str(folder), "--contexts", "40", "--prompts", "30"])
    assert done.exit_code == 0, done.output
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "at most" in done.stdout
    assert "No attention could" in " ".join(done.stdout.split())


def test_what_is_no_converted_folder_is_refused(tmp_path):
    done = RUNNER.invoke(app, ["bench", str(tmp_path)])
    assert done.exit_code != 0
    assert "No converted model in" in done.output or "No converted model in" in str(done.exception)
