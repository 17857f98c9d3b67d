"""What results show of themselves: a line as text, a table and a small picture in a notebook."""

import xml.etree.ElementTree as ET

import made_up
import pytest

import attngap

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


def test_names_cannot_put_markup_into_a_notebook(receipt):
    page = receipt.model_copy(update={"model": "<img src=x>", "notes": ["<b>"]})._repr_html_()
    parsed(page)
    assert "<img" not in page
    assert "<b></b>" not in page


def test_words_stand_to_the_left_and_numbers_to_the_right(diagnosis):
    """A notebook puts every cell to the right: reasons of three lines once stood there."""
    header = list(next(parsed(diagnosis._repr_html_()).iter("tr")))
    sides = {cell.text: cell.get("style") for cell in header}
    assert sides["verdict"] == sides["reason"] == "text-align: left"
    assert [side for name, side in sides.items() if name.startswith(("damage", "floor"))] == ["text-align: right"] * 2


def test_a_receipts_quality_carries_its_length(receipt):
    captions = [caption.text for caption in parsed(receipt._repr_html_()).iter("caption")]
    assert captions[0] == "Quality on held-out text, passages of 1,024 tokens"
