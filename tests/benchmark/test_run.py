"""The records of a benchmark, on sizes that take no time."""

import dataclasses

import pytest

from attngap.benchmark import measure, peers, run
from attngap.benchmark.run import compare, crossovers, first_win, growth, steps

LENGTHS = (32, 64)


@pytest.fixture(autouse=True)
def one_turn(monkeypatch):
    monkeypatch.setattr(measure, "ENOUGH", 1)


def test_every_record_is_complete(monkeypatch):
    monkeypatch.setattr(peers, "missing", lambda name: "gone" if name == "fast-transformers" else None)
    parts = list(compare((32,), heads=2, width=8))
    assert len(parts) == steps((32,)) == 9
    records = [record for _, found in parts for record in found]
    assert {r["op"] for r in records} == {"linear", "delta", "hybrid"}
    for record in records:
        assert {"op", "form", "direction", "n", "implementation"} <= set(record)
        if record["implementation"] == "fast-transformers":
            assert record["missing"] == "gone"
            continue
        assert record["milliseconds"] > 0
        assert record["extra_mb"] >= 0
        if record["implementation"] == "attngap":
            assert "sdpa" in record["ratios"]
            assert record["of_matmul_rate"] > 0


def test_ratios_are_of_the_times_beside_them():
    _, records = next(compare(LENGTHS, heads=2, width=8))
    times = {r["implementation"]: r["milliseconds"] for r in records if "missing" not in r}
    ours = next(r for r in records if r["implementation"] == "attngap")
    for name, ratio in ours["ratios"].items():
        assert ratio == pytest.approx(times[name] / times["attngap"])


def test_crossovers_cover_gated_and_plain_mechanisms():
    found = dict(crossovers(LENGTHS, ("softmax", "elu", "gla"), heads=2, width=8))
    assert list(found) == ["softmax", "elu", "gla"]
    for name, records in found.items():
        assert [r["n"] for r in records[:-1]] == list(LENGTHS)
        assert records[-1]["form"] == name
        assert records[-1]["measured_to"] == 64


def test_a_win_counts_only_if_it_lasts():
    assert first_win((1, 2, 4, 8), [1.0, 3.0, 3.0, 3.0], [2.0, 2.0, 4.0, 5.0]) == 4
    assert first_win((1, 2), [1.0, 1.0], [2.0, 2.0]) == 1
    assert first_win((1, 2), [1.0, 3.0], [2.0, 2.0]) is None


def test_growth_is_the_exponent_over_the_upper_half():
    assert growth((64, 128, 256), [9.0, 2.0, 8.0]) == pytest.approx(2.0)
    assert growth((1, 2, 4, 8, 16, 32), [7.0, 7.0, 7.0, 8.0, 32.0, 128.0]) == pytest.approx(2.0)
    # A point off the line between two others tilts it by no more than least squares says.
    assert growth((1, 1, 1, 2, 4, 8), [1.0, 1.0, 1.0, 1.0, 4.0, 4.0]) == pytest.approx(1.0)
    assert growth((64,), [1.0]) is None


def test_slow_peers_are_left_out_at_great_length(monkeypatch):
    monkeypatch.setattr(run, "LONGEST", {"sdpa": {"forward": 31}})
    for _, records in compare((32,), heads=2, width=8):
        sdpa = next(r for r in records if r["implementation"] == "sdpa")
        assert sdpa.get("missing") == ("not measured beyond 31 tokens" if sdpa["direction"] == "forward" else None)


def test_compiling_is_not_measured(monkeypatch):
    calls = []
    monkeypatch.setattr(run, "best_milliseconds", lambda found: calls.append("measured") or dict.fromkeys(found, 1.0))
    case = run.cases()[0]
    watched = dict(case.implementations)
    watched["attngap"] = lambda *inputs: calls.append(inputs[0].shape[2]) or case.implementations["attngap"](*inputs)
    monkeypatch.setattr(run, "cases", lambda: (dataclasses.replace(case, implementations=watched),))
    next(compare((32,), heads=2, width=8))
    assert calls[: calls.index("measured")].count(run.SHORT) >= len(case.directions)
