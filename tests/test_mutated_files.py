"""Every file that is read, damaged: it is read as it is or refused in one line, never a traceback, never a hang.

ATTNGAP_MUTATIONS says how many of each; `make trust` asks for thousands.
"""

import contextlib
import os
import random
import signal
import sqlite3
from pathlib import Path

import pytest

import attngap
from attngap.conversion.receipt import Receipt
from attngap.diagnosis.result import Diagnosis
from attngap.errors import AttngapError
from attngap.models.plan import Plan
from attngap.models.save import Base, conversion_record, set_conversion, weights_hash
from attngap.models.swap import swap
from attngap.probes.sweep import load_sweep
from attngap.report import results
from attngap.storage.runs import Runs
from tests.conversion.small import plan
from tests.made_up import diagnosis, receipt
from tests.mutations import mutate
from tests.zoo import mechanisms, tiny, tokenizer

COUNT = int(os.environ.get("ATTNGAP_MUTATIONS", "40"))
SECONDS = 20  # none of them takes one on an idle machine
SWEEP = """
name = "small"
[[grid]]
tasks = ["mqar", "copy"]
mechanisms = ["softmax", "elu"]
seeds = 2
learning_rates = [1e-3, 1e-2]
model = {layers = 1, width = [32, 64]}
train = {steps = 10}
"""


@contextlib.contextmanager
def in_time():
    def stop(*_):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def refusal(read) -> str:
    try:
        read()
    except AttngapError as error:
        return str(error)
    return ""


def damaged(path: Path, read, seed: int) -> None:
    whole = path.read_bytes()
    read()
    draw = random.Random(seed)
    for number in range(COUNT):
        path.write_bytes(mutate(whole, draw))
        with in_time():
            said = refusal(read)
        assert "\n" not in said, (path.name, number, said)
    path.write_bytes(whole)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A converted model with its base inside."""
    model, here = tiny(), tmp_path_factory.mktemp("converted")
    made = mechanisms(model)
    converted = swap(model, {layer: (m, [1]) for layer, m in made.items()})
    options = {
        layer: {"kv_heads": 2, "feature_map": "prototype", "window": 5, "sinks": 2, "relative": False, "gain": "query"}
        for layer in made
    }
    base = Base(name="base", architecture=type(model).__name__, sha256=weights_hash(model))
    set_conversion(converted, conversion_record(converted, options, plan(model), base, lora=0))
    attngap.save(converted, here, tokenizer=tokenizer(), original=model)
    return here


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["attngap.json", "adapter.safetensors", "config.json", "base/config.json"])
def test_converted_folders(folder, name):
    damaged(folder / name, lambda: attngap.load(folder), seed=1)


@pytest.mark.filterwarnings("ignore")
def test_weights(folder):
    damaged(folder / "base" / "model.safetensors", lambda: attngap.load(folder), seed=2)


def test_plans(tmp_path):
    path = tmp_path / "plan.json"
    plan(tiny()).save(path)
    damaged(path, lambda: Plan.load(path), seed=3)


def test_receipts(tmp_path):
    path = tmp_path / "receipt.json"
    receipt(tmp_path)
    damaged(path, lambda: Receipt.load(tmp_path), seed=4)


def test_diagnoses(tmp_path):
    path = tmp_path / "diagnosis.json"
    diagnosis(tmp_path)
    damaged(path, lambda: Diagnosis.load(tmp_path), seed=5)


def test_sweep_files(tmp_path):
    path = tmp_path / "sweep.toml"
    path.write_text(SWEEP)
    damaged(path, lambda: load_sweep(path), seed=6)


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
    with in_time(), pytest.raises(AttngapError):
        load_sweep(tmp_path / "sweep.toml")


def test_run_databases(tmp_path):
    path = tmp_path / "runs.db"
    with contextlib.closing(Runs(path)) as runs:
        for seed in range(20):
            spec = {"task": "mqar", "mechanism": "elu", "seed": seed, "learning_rate": 1e-3}
            runs.add(spec, {"score": 0.5, "seconds": 1.0}, {"commit": "x"})
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA journal_mode=DELETE")

    def read():
        with contextlib.closing(Runs(path, readonly=True)) as runs:
            list(runs.records())

    damaged(path, read, seed=7)


def test_a_pipe_in_place_of_a_file_is_no_hang(tmp_path):
    for name, read in (
        ("plan.json", lambda: Plan.load(tmp_path / "plan.json")),
        ("receipt.json", lambda: Receipt.load(tmp_path)),
        ("diagnosis.json", lambda: Diagnosis.load(tmp_path)),
        ("attngap.json", lambda: attngap.load(tmp_path)),
        ("sweep.toml", lambda: load_sweep(tmp_path / "sweep.toml")),
    ):
        os.mkfifo(tmp_path / name)
        with in_time(), pytest.raises(AttngapError):
            read()


def test_reports_read_or_leave_out_what_is_damaged(tmp_path):
    path = tmp_path / "diagnosis.json"
    diagnosis(tmp_path)
    damaged(path, lambda: results.read([tmp_path]), seed=8)
