"""The choice: what a plan predicts, drawn and said as its file has it."""

import json

import made_up
import pytest

from attngap.charts.conversion import predicted_quality
from attngap.report.page import Chart, Panels, Table
from attngap.report.results import read
from attngap.report.sections.plan import chosen_point, figures, levels, plan_sections, said


@pytest.fixture
def content(tmp_path):
    return made_up.plan(tmp_path / "plan.json", kept=6)


def blocks(folder):
    (section,) = plan_sections(read([folder]))
    return section.blocks


def test_the_band_is_the_interval_of_the_file(content, tmp_path):
    panels, _ = blocks(tmp_path)
    assert isinstance(panels, Panels)
    for chart, key in zip(panels.charts, ("perplexity_ratio", "recalled"), strict=True):
        drawn = json.loads(chart.spec["layer"][0]["data"]["values"])
        assert drawn == [{"kept": point["kept"], **point[key]} for point in content["curve"]]


def test_the_choice_is_said_with_its_interval(content, tmp_path):
    panels, table = blocks(tmp_path)
    point = next(point for point in content["curve"] if point["kept"] == 6)
    ratio, recall = point["perplexity_ratio"], point["recalled"]
    assert panels.caption.startswith(
        f"With softmax on 6 of 24 heads (25%) the plan expects {ratio['value']:.3f} times the original's perplexity "
        f"({ratio['low']:.3f} to {ratio['high']:.3f}) and {recall['value']:.0%} of its recall "
        f"({recall['low']:.0%} to {recall['high']:.0%}). "
    )
    assert isinstance(table, Table)
    (row,) = [row for row in table.rows if row["kept"] == 6]
    assert row["recalled_low"] == recall["low"]
    assert [row["kept"] for row in table.rows] == levels([point["kept"] for point in content["curve"]], 6)


@pytest.mark.parametrize(
    ("ratio", "recall", "sentence"),
    [
        (0.0, 0.0, "What was measured lies within the band."),
        (1.0, -0.5, "What was measured lies outside the band."),
        (1.0, 0.0, "Of what was measured, recall lies within the band, perplexity outside."),
    ],
)
def test_what_a_conversion_came_to_stands_in_the_picture(content, tmp_path, ratio, recall, sentence):
    point = chosen_point(content)
    quality = {
        "original": {"perplexity_ratio": 1.0, "induction": 0.5},
        "converted": {
            "perplexity_ratio": point["perplexity_ratio"]["value"] + ratio,
            "induction": 0.5 * (point["recalled"]["value"] + recall),
        },
    }
    made_up.receipt(tmp_path / "converted", kept=6, quality=quality)
    panels, _ = blocks(tmp_path)
    assert sentence in panels.caption
    assert ("diamond", "measured after converting, 1,024 tokens") in panels.key
    dot = json.loads(panels.charts[0].spec["layer"][-1]["data"]["values"])
    assert dot == [{"kept": 6, "value": quality["converted"]["perplexity_ratio"]}]


@pytest.mark.parametrize("held", [0.0, 0.2])
def test_what_a_prediction_does_not_count_is_said(content, tmp_path, held):
    quality = {name: {"perplexity_ratio": 1.0, "induction": 0.5} for name in ("original", "converted")}
    options = {"window": 64, "sinks": 4, "context": 1024, "held": held}
    made_up.receipt(tmp_path / "converted", kept=6, quality=quality, options=options)
    panels, _ = blocks(tmp_path)
    assert ("It also holds tokens from anywhere" in panels.caption) == bool(held)


def test_a_conversion_with_another_window_is_not_what_the_plan_spoke_of(content, tmp_path):
    made_up.receipt(tmp_path / "converted", kept=6, options={"window": 128, "sinks": 4, "context": 1024})
    panels, _ = blocks(tmp_path)
    assert "That is with a window of 64 keys: the conversion here has 128, and is not drawn." in panels.caption
    assert not any(shape == "diamond" for shape, _ in panels.key)
    assert "lies" not in panels.caption


def test_heads_that_cannot_be_replaced_are_not_counted(content):
    """The curve begins below all heads where some must stay: the plan stands at what it keeps beyond those."""
    content["curve"] = [point for point in content["curve"] if point["kept"] <= 20]
    assert chosen_point(content)["kept"] == 2


def test_a_plan_that_predicts_nothing_shows_what_it_has(tmp_path):
    content = made_up.plan(tmp_path / "plan.json", predicts=False)
    assert figures(content) == []
    (chart,) = blocks(tmp_path)
    assert isinstance(chart, Chart)
    assert "perplexity is not predicted from them" in chart.caption


def test_a_choice_without_recall_is_said_without_it(content):
    point = chosen_point(content) | {"recalled": None}
    assert said(point, 24).endswith("times the original's perplexity (1.075 to 1.150).")


def test_the_choice_can_be_moved():
    points = [{"kept": kept, "value": 1.0, "low": 0.9, "high": 1.1} for kept in range(5)]
    spec = predicted_quality(points, "perplexity", ".3f", 2).to_dict()
    assert {"name": "chosen", "value": 2} in spec["params"]
