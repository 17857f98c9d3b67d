"""`attngap report` from the command line."""

import json

import made_up
import pytest
from typer.testing import CliRunner

from attngap.cli.app import app
from attngap.errors import AttngapError

run = CliRunner().invoke


def test_one_page_from_any_mix(tmp_path):
    made_up.diagnosis(tmp_path / "diagnosis")
    made_up.receipt(tmp_path / "converted")
    made_up.plan(tmp_path / "plan.json")
    made_up.runs(tmp_path / "runs.sqlite")
    made_up.phase(tmp_path / "phase.json")
    page = tmp_path / "report.html"
    done = run(app, ["report", str(tmp_path), "-o", str(page), "--json"], catch_exceptions=False)
    answer = json.loads(done.stdout)
    assert answer["report"] == str(page)
    assert answer["bytes"] == page.stat().st_size < 3e6
    assert len(answer["results"]) == 5
    html = page.read_text()
    assert "Keep softmax on 3 of 24 heads; the other 21 work with a state of fixed size." in html
    assert "the cache is 88% smaller at 4,096 tokens" in html
    for title in ("What it costs", "What it gains", "The choice", "Heads", "Damage", "Selection", "Probes", "Why"):
        assert f">{title}</h2>" in html


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda folder: made_up.diagnosis(folder), "On recall the worst 2 of 24 heads carry "),
        (lambda folder: made_up.runs(folder / "runs.sqlite"), "On mqar, softmax goes 99% of the way from chance"),
        (lambda folder: made_up.phase(folder / "phase.json"), "Softmax finds one needle among 4,096 tokens"),
    ],
)
def test_each_kind_alone_gives_an_answer(tmp_path, make, sentence):
    make(tmp_path)
    done = run(app, ["report", str(tmp_path), "-o", str(tmp_path / "r.html")], catch_exceptions=False)
    assert done.stdout.endswith("MB from 1 result\n")
    assert sentence in (tmp_path / "r.html").read_text()


def test_a_conversion_that_was_not_measured_says_so(tmp_path):
    made_up.receipt(tmp_path, quality={}, speed={})
    done = run(app, ["report", str(tmp_path), "-o", str(tmp_path / "r.html")], catch_exceptions=False)
    assert done.exit_code == 0
    assert "was not measured yet: attngap eval DIR" in (tmp_path / "r.html").read_text()


def test_a_quick_diagnosis_has_no_damage_and_says_so(tmp_path):
    content = made_up.diagnosis(tmp_path)
    measured = (
        "damage",
        "recall_damage",
        "unavoidable",
        "lost",
        "importance",
        "floor",
        "ceiling",
        "floors",
        "ceilings",
    )
    for head in content["heads"]:
        head.update(dict.fromkeys(measured), ceilings=None, spectrum=None, reads=[])
    (tmp_path / "diagnosis.json").write_text(json.dumps(content | {"rank": None}))
    (tmp_path / "patterns.npz").unlink()
    run(app, ["report", str(tmp_path), "-o", str(tmp_path / "r.html")], catch_exceptions=False)
    html = (tmp_path / "r.html").read_text()
    assert "Statistics only: " in html
    assert ">Damage</h2>" not in html


def test_a_place_that_cannot_be_written(tmp_path):
    made_up.diagnosis(tmp_path)
    with pytest.raises(AttngapError, match=r"Cannot write '.*': No such file or directory\. Choose another place"):
        run(app, ["report", str(tmp_path), "-o", str(tmp_path / "no" / "r.html")], catch_exceptions=False)
