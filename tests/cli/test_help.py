"""Help on a terminal of 80 columns: whole lines, an example for each verb, and examples that the verb takes."""

import shlex
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from attngap.cli.app import app


def verbs(command: Any = None, path: tuple[str, ...] = ()) -> list:
    command = command or typer.main.get_command(app)
    if not hasattr(command, "commands"):
        return [pytest.param(path, command, id=" ".join(path))]
    return [found for name, each in command.commands.items() for found in verbs(each, (*path, name))]


def shown(*words: str) -> str:
    result = CliRunner().invoke(app, [*words, "--help"], prog_name="attngap", env={"COLUMNS": "80"})
    assert result.exit_code == 0
    return result.stdout


@pytest.mark.parametrize(("path", "command"), verbs())
def test_help_fits_and_has_an_example_that_the_verb_takes(path, command):
    text = shown(*path)
    assert max(map(len, text.splitlines())) <= 80
    examples = [line for line in text.splitlines() if line.startswith("    attngap ")]
    assert examples
    flags = {flag for parameter in command.params for flag in parameter.opts}
    for line in examples:
        words = shlex.split(line)
        assert tuple(words[1 : 1 + len(path)]) == path
        assert {word for word in words if word.startswith("-") and len(word) > 1} <= flags, line


@pytest.mark.parametrize("path", [(), ("theory",), ("probe",)])
def test_lists_of_verbs_cut_no_sentence(path):
    text = shown(*path)
    assert "..." not in text.split("Commands:")[1]
    assert max(map(len, text.splitlines())) <= 80


def test_verbs_stand_in_the_order_of_the_story():
    names = [line.split()[0] for line in shown().split("Commands:")[1].splitlines() if line.strip()]
    story = ["demo", "diagnose", "plan", "linearize", "generate", "chat", "eval", "report", "serve", "theory", "probe"]
    assert [name for name in names if name in story] == story
