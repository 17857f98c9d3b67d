import json
import sys

import pytest
from typer.testing import CliRunner

from attngap.cli.app import app
from attngap.errors import AttngapError
from attngap.report.results import read
from attngap.theory import statements

RUNNER = CliRunner(env={"COLUMNS": "80", "TERM": "dumb"})
QUICK = ["--n", "1024", "--d", "66", "--m", "10"]


def run(*arguments, code=0):
    done = RUNNER.invoke(app, ["theory", *arguments], catch_exceptions=False)
    assert done.exit_code == code, done.output
    return done.stdout


def fails(message, *arguments):
    with pytest.raises(AttngapError, match=message):
        RUNNER.invoke(app, ["theory", *arguments], catch_exceptions=False)


def test_law_as_json_is_the_law():
    found = json.loads(run("law", "--kernel", "softmax,linear,tilted:2", "--certified", "--distribution", "--json"))
    softmax, linear, tilted = found["laws"]
    assert softmax["success"] == pytest.approx(0.99995047853887, rel=1e-12)
    assert softmax["certified"]["low"] <= softmax["success"] <= softmax["certified"]["high"]
    assert softmax["certified"]["width"] < 1e-30
    assert softmax["distribution"]["D1"]["mean"] > softmax["distribution"]["D0"]["mean"]
    assert linear["success"] == 0.0
    assert linear["log_success"] is None  # minus infinity, which JSON has not
    assert tilted["success"] == pytest.approx(0.995, abs=1e-3)
    assert found["provenance"]["versions"]["attngap"]


def test_law_as_a_table_fits_80_columns_and_keeps_the_caveat():
    shown = run("law", "--kernel", "softmax,linear,tilted:2,polynomial:16", "--certified", "--success", "0.9")
    assert max(map(len, shown.splitlines())) <= 80
    assert "Another weight separates: --kernel tilted:2" in shown
    assert "smallest d for 0.9" in shown
    assert "…" not in shown


def test_law_takes_large_n():
    found = json.loads(run("law", "--n", "1e15", "--d", "1000002", "--kernel", "softmax", "--json"))["laws"][0]
    assert found["n"] == 10**15
    assert found["failure"] == pytest.approx(6.842e-9, rel=1e-3)


def test_a_rounded_n_is_a_size_and_the_count_taken_is_said():
    done = RUNNER.invoke(app, ["theory", "law", "--n", "1e6", "--d", "514", "--kernel", "softmax", "--json"])
    assert json.loads(done.stdout)["laws"][0]["n"] == 999936
    assert "n = 999936, the multiple of d - 2 = 512 nearest to 1e6" in done.stderr


def test_bad_input_is_one_line():
    fails("n must be a multiple of d - 2 = 512, got 1000000. Nearest: 999936 or 1000448", "law", "--n", "1000000")
    fails(r"b \+ c must be 1", "law", "--c", "0.4")
    fails("No kernel 'sofmax'. Did you mean 'softmax'", "law", "--kernel", "sofmax")
    fails("the part after ':' must be a number", "law", "--kernel", "polynomial:x")
    fails("A chart is written as", "phase", "-o", "phase.pdf")
    fails("No mechanism 'elo'. Did you mean 'elu'", "thresholds", "--mechanisms", "elo")
    fails("only polynomial:K takes a number", "thresholds", "--mechanisms", "elu:3")
    fails("n must be whole numbers with commas, got 'many'", "thresholds", "--n", "many")


def test_phase_writes_files_and_json(tmp_path):
    page, picture = tmp_path / "phase.html", tmp_path / "phase.svg"
    arguments = ["-o", str(page), "-o", str(picture), "--cells", "4", "--kernel", "softmax,linear"]
    found = json.loads(run("phase", *QUICK, *arguments, "--json"))
    assert found["kernels"] == ["softmax", "linear"]
    assert page.stat().st_size > 100_000
    assert picture.read_text().startswith("<svg")


def test_the_numbers_of_a_phase_diagram_need_no_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "altair", None)
    numbers = tmp_path / "phase.json"
    run("phase", *QUICK, "-o", str(numbers), "--cells", "3", "--kernel", "softmax")
    assert json.loads(numbers.read_text())["schema"] == "attngap.phase/1"
    assert read([tmp_path]).results[0].path == numbers  # what `attngap report` takes up
    fails("Charts need the extra 'report'", "phase", "-o", str(tmp_path / "phase.svg"))
    run("thresholds", "--n", "128", "--mechanisms", "softmax", "--json")


def test_check_prints_a_line_each_and_fails_on_any_failure(monkeypatch):
    good = statements.Statement("2.1", "two and two make four", lambda: "counted")
    bad = statements.Statement("6.1", "an example shows it", lambda: statements.require(False, "it does not"))
    monkeypatch.setattr(statements, "statements", lambda: (good,))
    assert run("check") == "ok   2.1  two and two make four: counted\n1 of 1 hold\n"
    monkeypatch.setattr(statements, "statements", lambda: (good, bad))
    shown = run("check", code=1)
    assert "FAIL 6.1  counterexample: an example shows it: RefutedError: it does not" in shown
    found = json.loads(run("check", "--json", code=1))
    assert found["failed"] == 1
    assert [(s["number"], s["holds"]) for s in found["statements"]] == [("2.1", True), ("6.1", False)]


def test_capacity_shows_where_the_law_holds():
    shown = run("capacity", "--rank", "32", "--value-dim", "32", "--vocabulary", "200", "--trials", "2")
    assert "an empirical law, not a bound" in shown
    assert max(map(len, shown.splitlines())) <= 80
    found = json.loads(run("capacity", "--rank", "32", "--value-dim", "32", "--trials", "2", "--json"))
    assert found["half"] == pytest.approx(74.1, abs=0.1)
    assert set(found["curves"]) == {"gaussian", "positive"}


def test_thresholds_table_and_plot(tmp_path):
    plot = tmp_path / "thresholds.svg"
    arguments = ["--n", "128,256", "--mechanisms", "softmax,linear,polynomial:8", "-o", str(plot)]
    shown = run("thresholds", *arguments)
    rows = {line.split()[0]: line.split() for line in shown.splitlines() if line.strip()}
    assert rows["linear"][1:3] == ["-", "-"]
    assert 0.1 < float(rows["softmax"][1]) < 0.6
    assert plot.read_text().startswith("<svg")
    found = json.loads(run("thresholds", *arguments, "--json"))
    needles = {(row["label"], row["n"]): row["needle"] for row in found["thresholds"]}
    assert needles["linear", 128] is None
    assert needles["softmax", 128] < needles["softmax", 256] < 0.618
    assert needles["polynomial:8", 128] < needles["polynomial:8", 256]
