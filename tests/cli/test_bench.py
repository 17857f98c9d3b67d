import json

import pytest
from typer.testing import CliRunner

from attngap import catalogue
from attngap.benchmark import measure
from attngap.cli import bench as module
from attngap.cli.app import app

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
    assert {r["direction"] for r in records} == {"forward", "forward+backward"}


def test_table_fits_80_columns(records, monkeypatch):
    monkeypatch.setattr(module, "measure", lambda quick: records)
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
