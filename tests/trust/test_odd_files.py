"""Files that only an enemy would write: refused in one line, without a hang. Random damage is in `files.py`."""

import json
import os

import pytest

import attngap
from attngap.conversion.receipt import Receipt
from attngap.diagnosis.result import Diagnosis
from attngap.errors import AttngapError
from attngap.heads.passages import read
from attngap.longcontext.suite import load_suite
from attngap.models.plan import Plan
from attngap.probes.sweep import load_sweep
from attngap.report import results
from tests import made_up
from tests.trust.damage import SECONDS, in_time
from tests.trust.files import SWEEP, converted


@pytest.mark.parametrize(
    "line",
    [
        'learning_rates = ["x"]',
        "seeds = 100000000",
        "seeds = [1e400]",
        "seeds = [99999999999999999999999]",
        "model = {width = [" + "1," * 40 + "], layers = [" + "1," * 40 + "], heads = [" + "1," * 40 + "]}",
        'tasks = [["mqar"]]',
        "learning_rates = [nan]",
        "train = {steps = inf}",
    ],
)
def test_odd_sweeps_are_refused(tmp_path, line):
    key = line.split(" = ")[0]
    kept = [each for each in SWEEP.splitlines() if not each.startswith(key)]
    (tmp_path / "sweep.toml").write_text("\n".join([*kept, line]))
    with in_time(SECONDS), pytest.raises(AttngapError):
        load_sweep(tmp_path / "sweep.toml")


PIPES = {
    "plan.json": Plan.load,
    "receipt.json": lambda path: Receipt.load(path.parent),
    "diagnosis.json": lambda path: Diagnosis.load(path.parent),
    "attngap.json": lambda path: attngap.load(path.parent),
    "sweep.toml": load_sweep,
    "suite.json": load_suite,
    "text.txt": lambda path: read([path]),
    "tiny.gguf": attngap.load,
    "report.json": lambda path: results.read([path]),
}


@pytest.mark.parametrize("name", PIPES)
def test_a_pipe_in_place_of_a_file_is_no_hang(name, tmp_path):
    os.mkfifo(tmp_path / name)
    with in_time(SECONDS), pytest.raises(AttngapError):
        PIPES[name](tmp_path / name)


@pytest.mark.parametrize(
    "name", ["adapter.safetensors", "tokenizer.json", "base/config.json", "base/model.safetensors"]
)
def test_a_pipe_inside_a_model_s_folder_is_no_hang(name, tmp_path):
    converted(tmp_path)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with in_time(SECONDS), pytest.raises(AttngapError, match="is not a file"):
        attngap.load(tmp_path)


def test_a_pipe_in_place_of_pictures_is_passed_over(tmp_path):
    from attngap.report.patterns import read_patterns

    made_up.diagnosis(tmp_path)
    (tmp_path / "patterns.npz").unlink()
    os.mkfifo(tmp_path / "patterns.npz")
    with in_time(SECONDS):
        assert read_patterns(tmp_path / "diagnosis.json", heads=24, tokens=256) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda found: found["heads"][0].update(layer=2**70),
        lambda found: found["heads"][17].update(damage=-1),
        lambda found: found["options"].update(passages={}),
    ],
)
def test_a_diagnosis_that_cannot_be_planned_by_is_told(tmp_path, change):
    found = made_up.diagnosis(tmp_path)
    change(found)
    (tmp_path / "diagnosis.json").write_text(json.dumps(found))
    with pytest.raises(AttngapError, match=r"This diagnosis is damaged \(.*\). Diagnose the model again"):
        Diagnosis.load(tmp_path).plan(keep=0.1)


@pytest.mark.parametrize("name", ["a" * 5000, "~nobody-of-this-name/model", "x\0y"])
def test_a_name_that_no_file_can_have_is_refused(name):
    with pytest.raises(AttngapError, match=r"No model at|Cannot load the model"):
        attngap.load(name)
