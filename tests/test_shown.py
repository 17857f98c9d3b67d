"""What results show of themselves: a line as text, a table and a small picture in a notebook."""

import xml.etree.ElementTree as ET

import made_up
import pytest

import attngap
from attngap.conversion.by_length import AtLength
from attngap.conversion.receipt_view import tables

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def diagnosis(tmp_path):
    made_up.diagnosis(tmp_path, layers=30, heads=9 * 2)
    return attngap.Diagnosis.load(tmp_path)


@pytest.fixture
def plan(tmp_path):
    made_up.plan(tmp_path / "plan.json", kept=5)
    return attngap.Plan.load(tmp_path / "plan.json")


@pytest.fixture
def receipt(tmp_path):
    made_up.receipt(tmp_path, kept=3)
    return attngap.Receipt.load(tmp_path)


def parsed(page: str) -> ET.Element:
    """The page as XML, which refuses what is not closed or not escaped."""
    return ET.fromstring(page)


@pytest.mark.parametrize("name", ["diagnosis", "plan", "receipt"])
def test_a_result_is_one_short_line(name, request):
    result = request.getfixturevalue(name)
    assert len(repr(result)) < 250
    assert repr(result).startswith(f"{type(result).__name__}(model='tiny'")
    assert "\n" not in repr(result) + str(result)


def test_a_diagnosis_counts_its_verdicts(diagnosis):
    counted = sum(head.verdict == "keep" for head in diagnosis.heads)
    assert "heads=540, " in repr(diagnosis)
    assert f"keep={counted}" in repr(diagnosis)


def test_a_diagnosis_draws_every_head_and_lists_the_worst(diagnosis):
    page = parsed(diagnosis._repr_html_())
    squares = {path.get("fill"): path.get("d").count("M") for path in page.iter(f"{SVG}path")}
    assert sum(squares.values()) == 540
    listed = [row[0].text for row in page.iter("tr")][1:]
    worst = sorted(diagnosis.heads, key=lambda head: -head.importance)
    assert listed == [head.id for head in worst[:10]]


def test_a_plan_draws_what_stays(plan):
    kept, replaced = (path.get("d").count("M") for path in parsed(plan._repr_html_()).iter(f"{SVG}path"))
    assert (kept, replaced) == (5, 19)


def test_a_receipt_shows_the_same_numbers_in_a_notebook_and_a_terminal(receipt, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    receipt.show()
    shown = capsys.readouterr().out
    page = parsed(receipt._repr_html_())
    cells = [cell.text for cell in page.iter("td")]
    assert len(cells) == 4 * 6 + 2 * 5
    for cell in cells:
        assert cell in shown
    assert len(list(page.iter(f"{SVG}rect"))) == 3  # the original is no distance from itself
    assert "The joint pass was short." in shown
    assert "Far keys" not in shown


@pytest.mark.parametrize("measured", [None, 0.5])
def test_repetition_has_a_column_where_it_was_measured(receipt, measured):
    row = AtLength(length=1024, part="original", repetition=measured)
    found = tables(receipt.model_copy(update={"by_length": [row]}))
    (grid,) = (each for each in found if each.title.endswith("last tokens"))
    assert ("repeated" in grid.header) == (measured is not None)
    assert len(grid.rows[0]) == len(grid.header)


def test_a_receipt_says_what_read_the_far_keys(receipt, capsys):
    made = receipt.model_copy(update={"provenance": {"far_part": "flash-linear-attention 0.6.0"}})
    made.show()
    assert "Far keys are read by flash-linear-attention 0.6.0" in capsys.readouterr().out
    assert "Far keys are read by flash-linear-attention 0.6.0" in made._repr_html_()


def test_names_cannot_put_markup_into_a_notebook(receipt):
    page = receipt.model_copy(update={"model": "<img src=x>", "notes": ["<b>"]})._repr_html_()
    parsed(page)
    assert "<img" not in page
    assert "<b></b>" not in page


def test_words_stand_to_the_left_and_numbers_to_the_right(diagnosis):
    """A notebook puts every cell to the right: reasons of three lines once stood there."""
    header = list(next(parsed(diagnosis._repr_html_()).iter("tr")))
    sides = {cell.text: cell.get("style") for cell in header}
    assert sides["verdict"] == "text-align: left"
    assert sides["reason"] == "text-align: left; min-width: 24em"  # a word a line on a phone, once
    assert [side for name, side in sides.items() if name.startswith(("damage", "floor"))] == ["text-align: right"] * 2


def test_a_receipts_quality_carries_its_length(receipt):
    captions = [caption.text for caption in parsed(receipt._repr_html_()).iter("caption")]
    assert captions[0] == "Quality on held-out text, passages of 1,024 tokens"


def test_a_chart_in_a_notebook_needs_no_net(diagnosis):
    """Altair's own would load its scripts from elsewhere, and show an error without a net."""
    shown = diagnosis.plot("damage").properties(width=300)._repr_mimebundle_(include=None, exclude=None)
    assert "text/html" not in shown
    squares = [path for path in ET.fromstring(shown["image/svg+xml"]).iter(f"{SVG}path") if path.get("aria-label")]
    assert len(squares) == 540
    assert len(shown["text/plain"]) < 200


def test_a_probe_is_a_line_and_a_small_table():
    quick = {"steps": 2, "batch": 4, "test": 8, "validation": 8}
    result = attngap.probe("copy", "elu", train=quick)
    score = f"{result.score:.3f}"
    assert repr(result) == f"Result(task=copy, mechanism=elu, accuracy={score}, chance=0.031, best=1.000, seeds=1)"
    cells = [cell.text for cell in parsed(result._repr_html_()).iter("td")]
    assert cells == ["copy", "elu", score, "0.031", "1.000", "1"]


def test_an_estimate_is_a_line_and_two_tables(capsys, monkeypatch):
    from attngap.costs.estimate import Cost, Estimate
    from attngap.costs.gain import Gain
    from attngap.costs.view import show

    monkeypatch.setenv("COLUMNS", "100")
    cost = Cost(seconds=90.0, stages={}, memory=2_000_000_000, beyond=10**9, disk=10**8)
    gain = Gain(context=4096, cache=10**9, converted_cache=10**8, token_seconds=0.2, converted_token_seconds=0.1)
    facts = {"parameters": 10**9, "layers": 2, "heads": 4, "replaceable_layers": 2, "dtype": "float32", "device": "cpu"}
    found = Estimate(
        model="<b>tiny",
        **facts,
        workers=1,
        weights=10**9,
        available=None,
        diagnose=cost,
        linearize=cost.model_copy(update={"seconds": 7000.0}),
        keep=0.1,
        gains=[gain],
        notes=["about"],
        options={"diagnose": {"text": "x" * 1000}},
        provenance={},
    )
    assert repr(found) == "Estimate(model='<b>tiny', diagnose='90 s, 2.0 GB', linearize='117 min, 2.0 GB')"
    show(found)
    printed = capsys.readouterr().out
    cells = [cell.text for cell in parsed(found._repr_html_()).iter("td")]
    assert cells[:5] == ["diagnose", "90 s", "2.00 GB", "1.00 GB", "100 MB"]
    assert cells[-1] == "2.00x"
    assert all(cell in printed for cell in cells)
