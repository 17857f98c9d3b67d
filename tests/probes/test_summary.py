import csv

import pytest
import scipy.stats

from attngap.probes.export import write_csv
from attngap.probes.summary import half_width, summarize
from attngap.storage.runs import Record


def record(seed, rate, score, validation, *, mechanism="elu", higher=True, best=1.0):
    spec = {
        "task": "copy",
        "mechanism": mechanism,
        "seed": seed,
        "learning_rate": rate,
        "task_options": {"items": 4},
        "model": {"width": 8},
        "train": {"steps": 3},
    }
    result = {
        "score": score,
        "validation": validation,
        "metric": "accuracy",
        "higher": higher,
        "chance": 0.5,
        "best": best,
        "predicted": 0.9,
        "solved": bool(score and score > 0.95),
        "parameters": 100,
        "state_floats": 64,
        "state_rank": 8,
        "seconds": 2.0,
        "curve": [[1, 2.0, 0.5]],
    }
    return Record(f"{mechanism}{seed}{rate}", spec, result, {"commit": "abc", "time": "now"}, "2026-01-01")


def test_the_learning_rate_is_chosen_by_validation_not_by_the_test():
    records = [record(0, 0.1, 0.6, 0.9), record(1, 0.1, 0.8, 0.9), record(0, 0.2, 1.0, 0.7), record(1, 0.2, 1.0, 0.7)]
    (summary,) = summarize(records)
    assert (summary.learning_rate, summary.learning_rates) == (0.1, (0.1, 0.2))
    assert summary.mean == pytest.approx(0.7)
    assert summary.closed == pytest.approx(0.4)
    assert summary.scores == (0.6, 0.8)


def test_lower_is_better_for_errors():
    (summary,) = summarize([record(0, 0.1, 0.3, 0.3, higher=False), record(0, 0.2, 0.6, 0.6, higher=False)])
    assert summary.learning_rate == 0.1


def test_divergence_rules_a_learning_rate_out():
    (summary,) = summarize([record(0, 0.1, 0.6, 0.6), record(0, 0.2, None, 0.99)])
    assert summary.learning_rate == 0.1
    (summary,) = summarize([record(0, 0.2, None, None)])
    assert summary.mean is None
    assert summary.closed is None


def test_mechanisms_stay_apart():
    assert [s.mechanism for s in summarize([record(0, 0.1, 0.6, 0.6), record(0, 0.1, 1.0, 1.0, mechanism="gla")])] == [
        "elu",
        "gla",
    ]


def test_interval_is_student_s():
    values = [0.2, 0.5, 0.4, 0.9]
    low, high = scipy.stats.t.interval(0.95, 3, loc=0.5, scale=scipy.stats.sem(values))
    assert half_width(values) == pytest.approx((high - low) / 2)
    assert half_width([0.3]) is None


def test_csv_has_a_column_for_everything_but_the_curve(tmp_path):
    write_csv([record(0, 0.1, 0.6, 0.6), record(1, 0.1, None, None)], tmp_path / "runs.csv")
    with (tmp_path / "runs.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["seed"] for row in rows] == ["0", "1"]
    assert rows[0]["task_options.items"] == "4"
    assert rows[0]["score"] == "0.6"
    assert rows[1]["score"] == ""
    assert "curve" not in rows[0]
