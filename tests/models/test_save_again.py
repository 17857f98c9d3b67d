"""A conversion is saved so that it loads: again, elsewhere, by a plan of other folders, out of memory alone."""

import json

import pytest
import torch

import attngap
from attngap.conversion.linearize import linearize
from attngap.models.save import load_converted
from tests.conversion.small import TEXT, plan
from tests.models.test_save import QUICK, logits
from tests.zoo import tiny, tokenizer


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The folder to stand in, with a model in models/tiny."""
    tiny().save_pretrained(tmp_path / "models/tiny")
    tokenizer().save_pretrained(tmp_path / "models/tiny")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def convert(name="models/tiny", planned="models/tiny", **options):
    model, words = attngap.load(name)
    made = plan(model)
    made = made.model_copy(update={"model": made.model.model_copy(update={"name": planned})})
    return linearize(model, words, made, TEXT, **QUICK, **options)[0]


def base_name(folder) -> str:
    return json.loads((folder / "attngap.json").read_text())["base"]["name"]


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("by", ["save", "save_pretrained"])
def test_a_loaded_conversion_can_be_saved_elsewhere(place, full, by):
    expected = logits(convert(directory="first", full=full))
    again, words = attngap.load("first")
    where = place / "far" / "away" / "second"
    if by == "save":
        attngap.save(again, where, tokenizer=words)
    else:
        again.save_pretrained(where)
        words.save_pretrained(where)
    assert base_name(where) == ("base" if full else "../../../models/tiny")
    assert torch.equal(logits(attngap.load(where)[0]), expected)


@pytest.mark.parametrize("full", [False, True])
def test_a_loaded_conversion_can_be_saved_where_it_was(place, full):
    expected = logits(convert(directory="first", full=full))
    before = base_name(place / "first")
    again, _ = attngap.load("first")
    again.save_pretrained("first")
    assert base_name(place / "first") == before
    assert torch.equal(logits(attngap.load("first")[0]), expected)


def test_a_base_that_had_moved_is_named_as_it_was_found(place):
    expected = logits(convert(directory="first"))
    (place / "models").rename(place / "moved")
    again, words = load_converted("first", base="moved/tiny")
    attngap.save(again, place / "deep" / "second", tokenizer=words)
    assert torch.equal(logits(attngap.load(place / "deep" / "second")[0]), expected)


def test_a_plan_made_elsewhere_does_not_say_where_the_model_is(place):
    """The plan's diagnosis may have been made from another folder, or on another machine."""
    expected = logits(convert(planned="../from/elsewhere/tiny", directory="first"))
    assert base_name(place / "first") == "../models/tiny"
    assert torch.equal(logits(attngap.load("first")[0]), expected)


def test_a_model_that_is_nowhere_on_disk_is_written_along(tmp_path):
    model, words = tiny(), tokenizer()
    made = linearize(model, words, plan(model), TEXT, directory=tmp_path / "new", **QUICK)[0]
    assert base_name(tmp_path / "new") == "base"
    assert torch.equal(logits(attngap.load(tmp_path / "new")[0]), logits(made))


def test_a_model_whose_folder_went_away_is_written_along(place):
    made = convert("./models/tiny")
    (place / "models").rename(place / "moved")
    attngap.save(made, "new", tokenizer=tokenizer())
    assert base_name(place / "new") == "base"
    assert torch.equal(logits(attngap.load("new")[0]), logits(made))
