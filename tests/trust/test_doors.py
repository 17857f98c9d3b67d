"""What goes out: tables for spreadsheets, names on a terminal, the last word after Ctrl-C."""

import csv
import os
import signal
import sys

import pytest

import attngap.cli.app
from attngap.cli import STOPPED, main
from attngap.cli.eval_suite import show
from attngap.errors import AttngapError
from attngap.longcontext.suite import Score, Suite
from attngap.probes.export import write_csv
from attngap.probes.summary import summarize
from attngap.storage.runs import Runs
from tests import made_up

FORMULAS = ("=1+1", "@SUM(A1)", "+cmd|' /C calc'!A0", "-2+3", "\t=1")


@pytest.fixture
def records(tmp_path):
    with Runs(made_up.runs(tmp_path / "runs.db"), readonly=True) as runs:
        return list(runs.records())


def test_a_cell_is_never_a_formula(tmp_path, records):
    for record, formula in zip(records, FORMULAS, strict=False):
        record.spec["mechanism"] = formula
    write_csv(records, tmp_path / "runs.csv")
    with (tmp_path / "runs.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["mechanism"] for row in rows[: len(FORMULAS)]] == [f"'{formula}" for formula in FORMULAS]
    assert rows[0]["learning_rate"] == "0.001"


def test_numbers_below_zero_stay_numbers(tmp_path, records):
    records[0].result["score"] = -0.5
    write_csv(records, tmp_path / "runs.csv")
    with (tmp_path / "runs.csv").open(encoding="utf-8") as file:
        assert next(csv.DictReader(file))["score"] == "-0.5"


@pytest.mark.parametrize("lost", ["seconds", "score", "higher"])
def test_a_run_that_lacks_a_figure_is_said_and_not_left_out(records, lost):
    del records[0].result[lost]
    with pytest.raises(AttngapError, match=rf"A stored run is not as attngap writes it \(KeyError: '{lost}'\)"):
        summarize(records)


@pytest.mark.parametrize("place", ["no/such/folder/runs.csv", "."])
def test_a_table_that_cannot_be_written_is_one_line(tmp_path, records, place):
    with pytest.raises(AttngapError, match=r"Cannot write .*Choose another file"):
        write_csv(records, tmp_path / place)


@pytest.mark.parametrize("name", ["[red]model", "model[/x]", "[link=http://x]y"])
def test_a_name_is_shown_as_it_is(capsys, monkeypatch, name):
    monkeypatch.setenv("COLUMNS", "200")
    score = Score(task="needle", length=64, model=name, questions=3, score=0.5, low=0.1, high=0.9, chance=0.1)
    show(Suite(models=[name], examples=3, seed=0, scores=[score]))
    assert name in capsys.readouterr().out


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def interrupted_inside_another_error() -> None:
    """As while numpy loads: Ctrl-C comes out as an error of something else."""
    try:
        interrupt()
    except KeyboardInterrupt:
        raise ImportError("numpy did not load") from None


@pytest.mark.parametrize("how", [interrupt, interrupted_inside_another_error, lambda: sys.exit(STOPPED)])
@pytest.mark.parametrize(("verb", "word"), [("linearize", " The same command goes on from here."), ("report", "")])
def test_ctrl_c_has_a_last_word(monkeypatch, capsys, how, verb, word):
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(attngap.cli.app, "app", how)
    monkeypatch.setattr(sys, "argv", ["attngap", verb])
    try:
        with pytest.raises(SystemExit) as left:
            main()
    finally:
        signal.signal(signal.SIGINT, before)
    assert left.value.code == STOPPED
    assert capsys.readouterr().err == f"attngap: stopped.{word}\n"


def test_an_error_of_our_own_is_not_taken_for_ctrl_c(monkeypatch):
    def broken() -> None:
        raise ImportError("really")

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(attngap.cli.app, "app", broken)
    try:
        with pytest.raises(ImportError, match="really"):
            main()
    finally:
        signal.signal(signal.SIGINT, before)
