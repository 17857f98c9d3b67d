"""`attngap diagnose` from end to end on a small model."""

import json

import pytest
from typer.testing import CliRunner

from attngap.cli.app import app
from attngap.cli.diagnose import parse_ranks
from attngap.errors import AttngapError
from tests import zoo

RUNNER = CliRunner()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A model folder, a text file and a finished diagnosis."""
    root = tmp_path_factory.mktemp("diagnose")
    zoo.tiny("llama").save_pretrained(root / "model")
    zoo.tokenizer().save_pretrained(root / "model")
    (root / "text.txt").write_text(" ".join(f"{i} green bottles hanging on the wall." for i in range(500)))
    diagnose(root, "-o", str(root / "out"), "--verify", "3")
    return root


def diagnose(root, *more: str):
    base = ["diagnose", str(root / "model"), "--text", str(root / "text.txt"), "--context", "48", "--passages", "2"]
    return RUNNER.invoke(app, [*base, "--ranks", "2,4", "--window", "6", "--draws", "1", *more])


def test_json_is_the_whole_diagnosis_and_nothing_else(place, tmp_path):
    done = diagnose(place, "-o", str(tmp_path / "json"), "--json")
    assert done.exit_code == 0, done.output
    content = json.loads(done.stdout)
    assert content["schema"] == "attngap.diagnosis/1"
    assert content == json.loads((tmp_path / "json" / "diagnosis.json").read_text())


def test_the_table_fits_eighty_columns_and_says_what_to_do_next(place, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    done = diagnose(place, "-o", str(tmp_path / "out"), "--verify", "3")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert any(line.split()[:5] == ["head", "sink", "near", "far", "κ"] for line in lines)
    assert "…" not in done.stdout
    assert "On text the worst 1 heads carry" in done.stdout
    assert "On recall the worst 1 heads carry" in done.stdout
    assert "rank correlation of estimated and real damage" in done.stdout.replace("\n", " ")
    assert "attngap plan" in done.stdout
    assert "statistics: done" in done.stderr


def test_quick_needs_no_ranks(place, tmp_path):
    done = diagnose(place, "-o", str(tmp_path / "out"), "--quick")
    assert done.exit_code == 0, done.output
    assert "floor" not in done.stdout


def test_mistakes_are_one_line(place, tmp_path):
    done = diagnose(place, "-o", str(place / "out"))
    assert isinstance(done.exception, AttngapError)
    assert "already holds a diagnosis" in str(done.exception)
    with pytest.raises(AttngapError, match="--ranks takes whole numbers"):
        parse_ranks("8,x")
    missing = RUNNER.invoke(app, ["diagnose", str(tmp_path / "none"), "-o", str(tmp_path / "out")])
    assert "no such file or folder" in str(missing.exception)
    assert not (tmp_path / "out").exists()
