import json
from importlib.metadata import EntryPoint

import pytest
from typer.testing import CliRunner

from attngap import catalogue, mechanism
from attngap.cli import facts
from attngap.cli.app import app
from attngap.errors import AttngapError
from attngap.mechanisms import catalogue as module

RUNNER = CliRunner(env={"COLUMNS": "80", "TERM": "dumb"})


def run(*arguments):
    done = RUNNER.invoke(app, ["mechanisms", *arguments], catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout


def test_table_has_every_name_and_fits_80_columns():
    lines = run().splitlines()
    assert max(map(len, lines)) <= 80
    rows = {line.split()[0]: line.split() for line in lines if line.strip()}
    assert set(catalogue()) <= set(rows)
    assert rows["elu"] == ["elu", "2006.16236", "4,160", "64", "-", "-", "yes"]
    assert rows["gated-delta"] == ["gated-delta", "2412.06464", "4,096", "64", "yes", "yes", "-"]
    assert rows["softmax"] == ["softmax", "1706.03762", "128", "per", "token", "tokens", "-", "-", "yes"]


def test_json_is_what_the_mechanisms_claim():
    records = {record["name"]: record for record in json.loads(run("--json"))}
    assert tuple(records) == catalogue()
    for name, record in records.items():
        m = mechanism(name, 1, 64)
        assert record["state_floats"] == m.state_floats(record["tokens"])
        assert record["state_rank"] == m.state_rank(record["tokens"])
        assert record["grows"] is (name == "softmax")
        assert (record["learned"], record["gated"], record["normalized"]) == (m.learned, m.gated, m.normalized)
    assert records["polynomial"]["options"] == {"degree": 2, "kv_heads": None, "causal": True}


def test_one_in_detail():
    text = run("hedgehog")
    assert "hedgehog (arXiv 2402.04347)" in text
    assert "softmax(x W)" in text
    assert "State of one head at dim 64: 8,320 floats, rank 127" in text
    assert "Options: features=None, kv_heads=None, causal=True" in text
    assert json.loads(run("hedgehog", "--json"))["name"] == "hedgehog"


def test_unknown_name():
    with pytest.raises(AttngapError, match=r"No mechanism 'hedgehgo'\. Did you mean 'hedgehog'"):
        run("hedgehgo")


def test_a_broken_plugin_costs_its_own_row_only(monkeypatch):
    broken = EntryPoint("broken", "no_such_package:Thing", module.GROUP)
    monkeypatch.setattr(module, "entry_points", lambda group: [broken])
    monkeypatch.setattr(facts, "entry_points", lambda group: [broken])
    module.plugins.cache_clear()
    try:
        text = run()
        assert "hybrid" in text
        assert "Mechanism 'broken' comes from no_such_package:Thing" in text
        assert json.loads(run("--json"))[-1]["error"].startswith("broken: Mechanism 'broken' comes from")
    finally:
        module.plugins.cache_clear()
