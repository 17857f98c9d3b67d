"""Charts: what they draw is what they were given, and Vega-Lite accepts every one of them."""

import json
import random

import made_up
import pytest
import vl_convert

from attngap.charts import conversion, heads, law, probes
from attngap.errors import AttngapError


@pytest.fixture(scope="module")
def rows():
    dice = random.Random(0)
    return [made_up.head(layer, place, 2, 4, dice) for layer in range(3) for place in range(4)]


def drawn(chart) -> list[dict]:
    """The rows of a chart's first data set."""
    spec = chart.to_dict()
    while "layer" in spec and "data" not in spec:
        spec = spec["layer"][0]
    return json.loads(spec["data"]["values"])


def charts(rows):
    points = [{"kept": 0.1, "part": "converted", "value": 1.02}, {"kept": 1.0, "part": "converted", "value": 1.0}]
    speed = [{"context": n, "part": name, "value": n / 7} for n in (1024, 4096) for name in ("original", "converted")]
    length = [{"length": n, "part": name, "value": n / 7} for n in (512, 4096) for name in ("original", "a new part")]
    score = {"mechanism": "elu", "state_floats": 272, "score": 0.3, "low": 0.2, "high": 0.4, "predicted": 0.5}
    yield from (heads.head_map(rows, color) for color in ("verdict", *(metric.key for metric in heads.METRICS)))
    yield heads.bounds([{"rank": 8, "floor": 0.1, "ceiling": 0.2}, {"rank": 16, "floor": 0.05, "ceiling": 0.1}])
    yield heads.spectrum([{"place": 1, "value": 0.5}, {"place": 2, "value": 0.1}])
    yield from (
        heads.damage_split(rows),
        heads.damage_split(rows, "recall"),
        heads.concentration(rows),
        heads.selection(rows, 256),
    )
    yield conversion.quality_against_kept(points, "perplexity")
    yield conversion.predicted_damage([{"kept": 3, "kind": "text", "damage": 0.1}], 3)
    expected = [{"kept": kept, "value": 1.1, "low": 1.0, "high": 1.2} for kept in (0, 4)]
    yield conversion.predicted_quality(expected, "perplexity", ".3f", 2, {"kept": 2, "value": 1.05})
    yield conversion.against_context(speed, "tokens a second", (1024, 4096))
    yield conversion.quality_against_length(length, "perplexity", positions=2048)
    yield conversion.quality_against_length(length[:2], "perplexity")
    yield law.success_curves([{"needle": 0.7, "kernel": "softmax", "success": 1.0}])
    yield probes.score_against_state([score], "accuracy", 0.1, 1.0)


def test_every_chart_compiles(rows):
    for chart in charts(rows):
        svg = vl_convert.vegalite_to_svg(chart.to_dict())
        assert "<path" in svg


def test_the_map_has_a_square_for_every_head(rows):
    assert [row["id"] for row in drawn(heads.head_map(rows, "floor"))] == [row["id"] for row in rows]


def test_an_unknown_color_names_those_that_exist(rows):
    with pytest.raises(AttngapError, match=r"No color 'flor'\. Did you mean 'floor'\?"):
        heads.head_map(rows, "flor")


@pytest.mark.parametrize(
    ("kind", "key", "least"),
    [("text", "damage", "unavoidable"), ("recall", "recall_damage", "recall_unavoidable")],
)
def test_the_split_of_a_bar_adds_up_to_its_damage_on_text_and_on_recall(rows, kind, key, least):
    """What would remain may exceed the damage; a bar is never longer than its damage, and nothing is then lost."""
    split = [row | {least: row[key] * share} for share, row in enumerate(rows)]
    parts = drawn(heads.damage_split(split, kind, most=5))
    worst = sorted(split, key=lambda row: -row[key])[:5]
    assert list(dict.fromkeys(part["id"] for part in parts)) == [head["id"] for head in worst]
    for head in worst:
        remains, lost = (part["damage"] for part in parts if part["id"] == head["id"])
        assert remains == pytest.approx(min(head[key], head[least]))
        assert remains + lost == pytest.approx(head[key])


def test_concentration_ends_at_everything(rows):
    points = drawn(heads.concentration(rows))
    for kind, key in (("text", "damage"), ("recall", "recall_damage")):
        shares = [point["share"] for point in points if point["kind"] == kind]
        assert shares[0] == 0
        assert shares[-1] == pytest.approx(1)
        assert shares[1] == pytest.approx(max(row[key] for row in rows) / sum(row[key] for row in rows))


def test_a_line_of_selection_goes_through_its_point_and_crosses_one_at_n_star(rows):
    spec = heads.selection(rows, 256).to_dict()
    lines, points = (json.loads(spec["layer"][place]["data"]["values"]) for place in (0, 3))
    assert len(points) == sum(row["kappa"] > 0 for row in rows)
    for head in points:
        own = [point for point in lines if point["id"] == head["id"]]
        assert next(point["kappa"] for point in own if point["n"] == 256) == pytest.approx(head["kappa"])
        assert all(point["n"] <= head["n_star"] for point in own if point["kappa"] >= 1)
        assert all(point["n"] >= head["n_star"] for point in own if point["kappa"] < 1)


def test_a_legend_names_only_what_is_drawn(rows):
    kept = [row | {"verdict": "keep"} for row in rows]
    assert heads.selection(kept, 256).to_dict()["layer"][0]["encoding"]["color"]["scale"]["domain"] == ["keep"]
    assert heads.head_map(kept).to_dict()["encoding"]["color"]["scale"]["domain"] == ["keep"]


@pytest.mark.parametrize(
    ("second", "expected"),
    [([10.0, 10.0, 10.0], (1024, 4096)), ([30.0] * 3, None), ([1.0] * 3, None), ([10.0, 4.0, 5.0], (4096, 8192))],
    ids=["crosses", "leads", "never", "at the last"],
)
def test_overtaking_is_told_between_two_measured_contexts(second, expected):
    contexts = (1024, 4096, 8192)
    first = list(zip(contexts, (20.0, 5.0, 2.0), strict=True))
    assert conversion.overtakes(first, list(zip(contexts, second, strict=True))) == expected


def test_what_was_not_measured_is_not_drawn(rows):
    holes = [row | {"floor": float("nan")} for row in rows]
    assert {row["floor"] for row in drawn(heads.head_map(holes, "floor"))} == {None}


def scored(mechanism, state_floats, score, predicted=None):
    around = {"low": score - 0.1, "high": score + 0.1, "predicted": predicted}
    return {"mechanism": mechanism, "state_floats": state_floats, "score": score, **around}


def test_names_of_mechanisms_stand_beside_their_largest_state_and_apart():
    points = [scored("elu", 500, 0.2), scored("gla", 500, 0.2), scored("mala", 510, 0.21), scored("elu", 4000, 1.0)]
    placed = {label["mechanism"]: label for label in probes.place_labels(points, 1.1)}
    assert placed["elu"]["state_floats"] == 4000
    assert placed["elu"]["place"] == 1.0
    assert placed["gla"]["place"] == 0.2
    assert placed["mala"]["place"] == pytest.approx(0.2 + 0.8 * probes.LINE)


def test_names_that_would_leave_the_picture_go_down_instead():
    points = [scored(name, 500, score) for name, score in (("a", 0.0), ("b", 1.0), ("c", 1.0), ("d", 1.0))]
    placed = {label["mechanism"]: label["place"] for label in probes.place_labels(points, 1.01)}
    assert placed == {
        "a": 0.0,
        "b": pytest.approx(1.01 - 2 * probes.LINE),
        "c": pytest.approx(1.01 - probes.LINE),
        "d": pytest.approx(1.01),
    }


def test_only_mechanisms_at_several_sizes_have_a_color():
    points = [scored("elu", 500, 0.2, 0.5), scored("elu", 900, 0.3, 0.6), scored("softmax", 900, 1.0)]
    svg = vl_convert.vegalite_to_svg(probes.score_against_state(points, "accuracy", 0.1, 1.0).to_dict())
    assert svg.count(f'fill="{probes.COLORS[0]}"') == 3  # two points and a name
    assert "predicted for a random memory" in svg
    one = probes.score_against_state(points[2:], "accuracy", 0.1, 1.0).to_dict()
    assert "predicted for a random memory" not in vl_convert.vegalite_to_svg(one)
