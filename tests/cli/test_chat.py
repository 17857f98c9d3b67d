"""Talking to models in a terminal: both, streaming, with history and the size of the cache; and Ctrl-C."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from attngap import catalogue
from attngap.cli import complete
from attngap.cli.app import app
from attngap.cli.facts import known
from attngap.cli.mechanisms import describe
from attngap.probes.tasks.catalogue import TASKS

from .test_linearize import place  # noqa: F401 - a fixture


def run(*arguments, typed=None):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=typed)


def test_both_models_answer_and_their_caches_are_shown(place):  # noqa: F811
    typed = "the cat\n/both\nthe dog\n/original\nthe cat\n/clear\n/nonsense\n/quit\n"
    done = run("chat", place / "fast", "--tokens", "3", typed=typed)
    assert done.exit_code == 0, done.output
    counts = re.findall(r"\[(converted|original): ([\d,]+) tokens, cache [\d.]+ MB", done.stderr)
    assert [name for name, _ in counts] == ["converted", "converted", "original", "original"]
    assert int(counts[1][1]) > int(counts[0][1])  # the second turn goes on from the first
    assert "Now answering: converted, original." in done.stderr
    assert "No command '/nonsense'." in done.stderr


def test_a_model_that_is_not_converted_answers_by_its_name(place):  # noqa: F811
    done = run("chat", place / "base", "--tokens", "2", typed="the cat\n/converted\n")
    assert "[original: " in done.stderr
    assert "There is no converted model here; this one is not converted." in done.stderr


def test_a_prompt_comes_from_standard_input(place):  # noqa: F811
    piped = run("generate", place / "fast", "--tokens", "3", "--json", typed="the cat")
    given = run("generate", place / "fast", "the cat", "--tokens", "3", "--json")
    assert json.loads(piped.stdout) == json.loads(given.stdout)
    original = run("generate", place / "base", "-", "--tokens", "3", typed="the cat")
    assert original.exit_code == 0
    assert "[cache " in original.stderr


def test_who_answers_is_checked(place):  # noqa: F811
    assert "No model to answer 'bot'. Did you mean 'both'?" in str(
        run("chat", place / "fast", "--which", "bot").exception
    )


def test_names_are_completed():
    assert complete.mechanisms("elu,ga") == ["elu,gated-delta"]
    assert complete.tasks("cop") == ["copy"]
    assert complete.several("", ["a", "b"]) == ["a", "b"]


def test_what_is_written_down_of_mechanisms_is_what_they_say():
    assert tuple(known()) == catalogue()
    for name, record in known().items():
        assert json.loads(json.dumps(describe(name), default=repr)) == record
    assert complete.tasks("") == [task.name for task in TASKS]


def test_showing_mechanisms_loads_no_torch():
    code = "import sys; from attngap.cli import main; sys.argv = ['attngap', 'mechanisms']\n"
    code += "try: main()\nexcept SystemExit: pass\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "False", done.stderr


@pytest.mark.parametrize(
    ("verb", "line"),
    [
        ("probe", "attngap: stopped. The same command goes on from here.\n"),
        ("serve", "attngap: stopped.\n"),
        ("theory", "attngap: stopped. Nothing was written; the same command starts anew.\n"),
    ],
)
def test_ctrl_c_is_one_line_that_says_how_to_go_on(tmp_path, verb, line):
    arguments = {
        "probe": ["probe", "run", "copy", "--db", str(tmp_path / "runs.db"), "--workers", "1"],
        "serve": ["serve", str(tmp_path), "--port", "0"],
        "theory": ["theory", "check"],
    }[verb]
    code = f"import sys, attngap.cli, attngap.cli.{verb} as verb\n"
    code += "import attngap.cli.app\nprint('ready', flush=True)\n"
    code += f"sys.argv = ['attngap', *{arguments!r}]\nattngap.cli.main()"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
    )
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=120)
    assert process.returncode == 130
    assert told.endswith(line)
    assert "Traceback" not in told
