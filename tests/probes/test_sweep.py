import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from attngap.errors import AttngapError
from attngap.probes.runs import check, finished, run_all
from attngap.probes.spec import make_spec
from attngap.probes.sweep import load_sweep, read_sweep
from attngap.storage.runs import Runs, spec_key

TINY = {"steps": 3, "batch": 4, "evaluate_every": 1, "validation": 4, "test": 8}
GRID = {
    "tasks": ["copy"],
    "mechanisms": ["elu", "softmax"],
    "seeds": 3,
    "learning_rates": [1e-3, 1e-2],
    "task": {"items": 4, "symbols": 4},
    "model": {"width": 8, "heads": 1, "layers": 1},
    "train": TINY,
}
REPOSITORY = Path(__file__).parents[2]


def specs_of(**changes):
    return read_sweep({"name": "tiny", "grid": [{**GRID, **changes}]})[1]


def test_grid_is_every_combination():
    specs = specs_of(task={"items": [2, 3], "symbols": 4}, model={"width": [8, 16], "heads": 1, "layers": 1})
    assert len({spec_key(spec) for spec in specs}) == 2 * 3 * 2 * 2 * 2
    seen = {
        (s["mechanism"], s["seed"], s["learning_rate"], s["task_options"]["items"], s["model"]["width"]) for s in specs
    }
    assert seen == set(itertools.product(("elu", "softmax"), range(3), (1e-3, 1e-2), (2, 3), (8, 16)))


def test_repeats_are_dropped_and_all_means_the_catalogue():
    from attngap.mechanisms.catalogue import catalogue

    assert len(read_sweep({"grid": [GRID, GRID]})[1]) == 12
    names = [spec["mechanism"] for spec in specs_of(mechanisms=["all", "elu"], seeds=[7], learning_rates=1e-3)]
    assert sorted(names) == sorted(catalogue())


def test_grid_after_grid_and_in_each_one_seed_before_the_next():
    other = {**GRID, "tasks": ["mqar"], "task": {"length": 16, "pairs": 2, "vocabulary": 16}}
    order = [(spec["task"], spec["seed"]) for spec in read_sweep({"grid": [GRID, other]})[1]]
    assert order == [(name, seed) for name in ("copy", "mqar") for seed in range(3) for _ in range(4)]


def test_a_run_in_this_process_can_be_watched(tmp_path):
    specs = specs_of(seeds=1, learning_rates=[1e-3])
    seen = []
    with Runs(tmp_path / "runs.db") as runs:
        list(run_all(specs, runs, sweep="tiny", watch=lambda spec, *now: seen.append((spec["mechanism"], now[0]))))
    assert seen == [(name, step) for name in ("elu", "softmax") for step in (1, 2, 3)]


def test_defaults_are_written_out_so_that_the_key_sees_them():
    spec = make_spec("mqar", "elu")
    assert spec["train"]["clip"] == 1.0
    assert spec["task_options"]["power"] == 0.01
    assert spec_key(spec) == spec_key(make_spec("mqar", "elu", train={"clip": 1.0}))
    assert spec_key(spec) != spec_key(make_spec("mqar", "elu", train={"clip": 2.0}))


def test_every_run_is_stored_once_and_never_computed_again(tmp_path):
    specs = specs_of(seeds=2)
    with Runs(tmp_path / "runs.db") as runs:
        first = list(run_all(specs, runs, sweep="tiny"))
        assert [done.error for done in first] == [None] * 8
        assert list(run_all(specs, runs, sweep="tiny")) == []
        more = list(run_all(specs_of(seeds=3), runs, sweep="tiny"))
        assert sorted(done.spec["seed"] for done in more) == [2] * 4
        assert runs.progress()[0].done == runs.progress()[0].total == 12
        assert [record.spec for record in finished(specs, runs)] == specs


def test_two_workers_give_the_same_numbers_as_one(tmp_path):
    specs = specs_of(seeds=2)
    scores = []
    for workers in (1, 2):
        with Runs(tmp_path / f"{workers}.db") as runs:
            assert len(list(run_all(specs, runs, sweep="tiny", workers=workers))) == 8
            scores.append([record.result["curve"] for record in finished(specs, runs)])
    assert scores[0] == scores[1]


KILLED = """
import json, os, random, signal, sys, time
import torch
from pathlib import Path
from attngap.probes.runs import run_all
from attngap.probes.sweep import read_sweep
from attngap.storage.runs import Runs
torch.set_num_threads(1)
folder, grid = Path(sys.argv[1]), json.loads(sys.argv[2])
_, specs = read_sweep({"grid": [grid]})
chance = random.Random(0)

def sweep():
    with Runs(folder / "runs.db") as runs:
        for done in run_all(specs, runs, sweep="tiny", checkpoints=folder / "checkpoints"):
            print("ran", flush=True)

kills = 0
while kills < 25:
    child = os.fork()  # torch is imported once; every child is a driver of its own
    if child == 0:
        sweep()
        os._exit(0)
    time.sleep(chance.uniform(0.0, 0.15))
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    kills += os.WIFSIGNALED(status)
    if os.WIFEXITED(status):  # it was through before the kill: begin again with one run less
        with Runs(folder / "runs.db") as runs:
            runs._db.execute("DELETE FROM runs WHERE key = (SELECT min(key) FROM runs)")
            print("took", flush=True)
sweep()
"""


def test_killed_25_times_and_resumed_loses_nothing_and_repeats_nothing(tmp_path):
    specs = specs_of(seeds=5)
    command = [sys.executable, "-W", "ignore", "-c", KILLED, str(tmp_path), json.dumps({**GRID, "seeds": 5})]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    with Runs(tmp_path / "runs.db", readonly=True) as runs:
        records = finished(specs, runs)
        assert len(records) == len(runs.records()) == len(specs) == 20
    assert list((tmp_path / "checkpoints").glob("*.safetensors")) == []
    lines = done.stdout.split()
    # A kill between storing a run and saying so is the only way to miss a line; none is ever run twice.
    assert len(specs) + lines.count("took") - 25 <= lines.count("ran") <= len(specs) + lines.count("took")
    with Runs(tmp_path / "whole.db") as runs:
        list(run_all(specs, runs, sweep="tiny"))
        whole = finished(specs, runs)
    assert [record.result["curve"] for record in records] == [record.result["curve"] for record in whole]


def test_a_failing_run_is_noted_and_tried_again(tmp_path, monkeypatch):
    from attngap.probes import runs as module

    specs = specs_of(seeds=1, learning_rates=[1e-3])

    def broken(job):
        raise RuntimeError("no luck") if job.spec["mechanism"] == "elu" else AttngapError("not today")

    with Runs(tmp_path / "runs.db") as runs:
        with monkeypatch.context() as patch:
            patch.setattr(module, "execute", broken)
            errors = [done.error for done in run_all(specs, runs, sweep="tiny")]
        assert errors[0].endswith("RuntimeError: no luck\n")
        assert errors[1] == "not today"
        assert runs.progress()[0].failed == 2
        with pytest.raises(AttngapError, match="2 of 2 runs did not finish; the first: RuntimeError: no luck"):
            finished(specs, runs)
        assert [done.error for done in run_all(specs, runs, sweep="tiny")] == [None, None]
        assert runs.progress()[0].failed == 0


def test_the_checked_in_sweep_is_sound():
    name, specs = load_sweep(REPOSITORY / "benchmarks" / "probes.toml")
    assert name == "cpu"
    check(specs)
    tasks = {spec["task"] for spec in specs if spec["mechanism"] == "gated-delta"}
    assert len(tasks) == 9


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = ", "is not TOML"),
        ("name = 'x'", r"a sweep needs at least one \[\[grid\]\]"),
        ("nmae = 'x'", r"No key of a sweep file 'nmae'\. Did you mean 'name'\?"),
        (
            "[[grid]]\ntasks = ['copy']\nmechanism = ['elu']",
            r"No key of \[\[grid\]\] 'mechanism'\. Did you mean 'mechanisms'",
        ),
        ("[[grid]]\ntasks = ['copy']", "needs mechanisms, a list of names, got None"),
        ("[[grid]]\ntasks = ['mqra']\nmechanisms = ['elu']", r"No task 'mqra'\. Did you mean 'mqar'\?"),
        (
            "[[grid]]\ntasks = ['copy']\nmechanisms = ['eluu']\nstate = 100",
            r"No mechanism 'eluu'\. Did you mean 'elu'\?",
        ),
        ("[[grid]]\ntasks = ['copy']\nmechanisms = ['elu']\n[grid.task]\nitem = 3", r"'item'\. Did you mean 'items'\?"),
        (
            "[[grid]]\ntasks = ['copy']\nmechanisms = ['elu']\n[grid.model]\nwidht = 3",
            r"'widht'\. Did you mean 'width'\?",
        ),
        (
            "[[grid]]\ntasks = ['copy']\nmechanisms = ['elu']\n[grid.train]\nsteps = 1.5",
            "train: steps must be int, got 1.5",
        ),
        ("[[grid]]\ntasks = ['copy']\nmechanisms = ['elu']\nseeds = 'a'", "seeds must be a count or a list"),
        ("[[grid]]\ntasks = ['mqar']\nmechanisms = ['elu']\n[grid.task]\npairs = 1000", "pairs must be at most half"),
        (
            "[[grid]]\ntasks = ['copy']\nmechanisms = ['elu']\nlearning_rates = [0.0]",
            "learning_rate must be a number above 0",
        ),
    ],
)
def test_bad_files(tmp_path, text, message):
    file = tmp_path / "sweep.toml"
    file.write_text(text)
    with pytest.raises(AttngapError, match=message) as caught:
        load_sweep(file)
    assert "\n" not in str(caught.value)
    assert str(file) in str(caught.value)


def test_unknown_mechanism_is_told_before_anything_runs(tmp_path):
    with Runs(tmp_path / "runs.db") as runs:
        with pytest.raises(AttngapError, match=r"No mechanism 'eluu'\. Did you mean 'elu'\?"):
            list(run_all(specs_of(mechanisms=["softmax", "eluu"]), runs, sweep="tiny"))
        assert runs.records() == []


def test_no_file():
    with pytest.raises(AttngapError, match=r"No sweep file 'nowhere\.toml'"):
        load_sweep("nowhere.toml")
