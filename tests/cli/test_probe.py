import csv
import json
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from attngap.cli.app import app
from attngap.errors import AttngapError
from attngap.probes.tasks.catalogue import TASKS
from attngap.storage.runs import Runs

TINY = ("--set", "model.width=8", "--set", "model.heads=1", "--set", "model.layers=1", "--set", "task.items=3")
LOOP = (
    "--learning-rates",
    "4e-3",
    "--set",
    "train.steps=3",
    "--set",
    "train.batch=4",
    "--set",
    "train.validation=4",
    "--set",
    "train.test=4",
)


def call(*arguments, code=0):
    result = CliRunner().invoke(app, ["probe", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


@pytest.fixture
def db(tmp_path):
    path = tmp_path / "runs.db"
    call("run", "copy", "-m", "softmax,elu", "--seeds", 2, "--db", path, *TINY, *LOOP)
    return path


def test_list():
    shown = call("list").stdout
    assert all(cls.name in shown for cls in TASKS)
    assert max(map(len, shown.splitlines())) <= 80
    records = json.loads(call("list", "--json").stdout)
    assert [record["task"] for record in records] == [cls.name for cls in TASKS]
    assert all(record["chance"] is not None for record in records)


def test_run_prints_a_table_and_stores_every_run(db):
    again = call("run", "copy", "-m", "softmax,elu", "--seeds", 2, "--db", db, *TINY, *LOOP)
    assert "4 of 4 runs are in" in again.stderr
    assert "softmax" in again.stdout
    assert "±" in again.stdout
    assert max(map(len, again.stdout.splitlines())) <= 80
    with Runs(db, readonly=True) as runs:
        assert len(runs.records()) == 4


def test_run_json_is_all_there_is_on_stdout(db):
    out = call("run", "copy", "-m", "elu", "--seeds", 2, "--db", db, "--json", *TINY, *LOOP).stdout
    (summary,) = json.loads(out)
    assert summary["mechanism"] == "elu"
    assert len(summary["scores"]) == 2


def test_run_with_matched_states(tmp_path):
    path = tmp_path / "runs.db"
    arguments = ("--state", 150, "--db", path, "--json", *TINY, *LOOP)
    summaries = json.loads(call("run", "copy", "-m", "elu,taylor", *arguments).stdout)
    assert all(0.75 * 150 <= summary["state_floats"] <= 1.25 * 150 for summary in summaries)


def test_results_filter_pivot_and_export(db, tmp_path):
    assert [s["mechanism"] for s in json.loads(call("results", "--db", db, "-m", "elu", "--json").stdout)] == ["elu"]
    assert json.loads(call("results", "--db", db, "--task", "mqar", "--json").stdout) == []
    pivot = call("results", "--db", db, "--pivot").stdout.split()
    assert pivot[:2] == ["mechanism", "copy"]
    assert {"softmax", "elu"} <= set(pivot)
    call("results", "--db", db, "--csv", tmp_path / "runs.csv")
    with (tmp_path / "runs.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 4


def test_results_plot(db, tmp_path):
    shown = call("results", "--db", db, "--plot", tmp_path / "copy.svg").stdout
    svg = (tmp_path / "copy.svg").read_text()
    assert shown == ""
    assert svg.startswith("<svg")
    assert all(text in svg for text in ("softmax", "elu", "accuracy", "state after the whole sequence"))
    with pytest.raises(AttngapError, match=r"--plot writes SVG, got .*copy\.png'\. Name it copy\.svg"):
        call("results", "--db", db, "--plot", tmp_path / "copy.png")
    with pytest.raises(AttngapError, match=r"--plot draws one task, found no runs\. Choose one: --task mqar"):
        call("results", "--db", db, "--task", "mqar", "--plot", tmp_path / "none.svg")


SWEEP = """
name = "night"
[[grid]]
tasks = ["copy"]
mechanisms = ["elu"]
seeds = 30
learning_rates = [4e-3]
[grid.task]
items = 3
[grid.model]
width = 8
heads = 1
layers = 1
[grid.train]
steps = 3
batch = 4
validation = 4
test = 4
"""


def test_sweep_and_watch(tmp_path):
    """A sweep in another process, followed from here to its end."""
    file, path = tmp_path / "sweep.toml", tmp_path / "runs.db"
    file.write_text(SWEEP)
    assert call("sweep", file, "--db", path, "--dry-run").stdout == "night: 30 of 30 runs to do\n"
    start = "from attngap.cli import main; main()"
    command = [sys.executable, "-c", start, "probe", "sweep", str(file), "--db", str(path), "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not _planned(path) and time.monotonic() < deadline:
        time.sleep(0.05)
    watched = call("results", "--db", path, "--watch", "--sweep", "night").stderr
    out, _ = process.communicate(timeout=60)
    assert watched.strip().splitlines()[-1].startswith("night  [####################]  30/30")
    assert len(json.loads(out)[0]["scores"]) == 30
    dry = json.loads(call("sweep", file, "--db", path, "--dry-run", "--json").stdout)
    assert dry == {"sweep": "night", "runs": 30, "missing": 0}


def _planned(path):
    try:
        with Runs(path, readonly=True) as runs:
            return bool(runs.progress())
    except AttngapError:  # not there yet, or only half made
        return False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "mqra"), r"No task 'mqra'\. Did you mean 'mqar'\?"),
        (("run", "mqar", "-m", "softmaxx"), r"No mechanism 'softmaxx'\. Did you mean 'softmax'\?"),
        (("run", "mqar", "--set", "pairs=3"), r"--set 'pairs=3' is not table\.key=value"),
        (("run", "mqar", "--set", "taks.pairs=3"), r"No table of --set 'taks'\. Did you mean 'task'\?"),
        (("run", "mqar", "--set", "task.pairs=99"), "mqar: length must be at least 4 x pairs = 396, got 64"),
        (("run", "mqar", "--learning-rates", "fast"), "--learning-rates takes numbers with commas between them"),
        (("run", "mqar", "--workers", "0"), "workers must be at least 1, got 0"),
        (("run", "copy", "--ray", "nowhere"), "Ray address 'nowhere' is not host:port"),
        (("sweep", "nowhere.toml"), r"No sweep file 'nowhere\.toml'"),
        (("results", "--db", "nowhere.db"), r"No run database at nowhere\.db"),
    ],
)
def test_bad_input(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AttngapError, match=message) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)


def test_nothing_to_watch(db, tmp_path):
    with pytest.raises(AttngapError, match=r"No sweep 'day'\. .*run copy"):
        call("results", "--db", db, "--watch", "--sweep", "day")
    empty = tmp_path / "empty.db"
    Runs(empty).close()
    with pytest.raises(AttngapError, match="holds no sweep to watch"):
        call("results", "--db", empty, "--watch")
