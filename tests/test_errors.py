"""The line that says how to install an extra: for this environment, from where attngap itself came."""

import json
import shlex
import sys
from pathlib import Path

import pytest

from attngap import errors


class Installed:
    def __init__(self, origin: dict | None):
        self.origin = origin

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return self.origin and json.dumps(self.origin)


@pytest.fixture
def came_from(monkeypatch):
    return lambda origin: monkeypatch.setattr(errors.metadata, "distribution", lambda name: Installed(origin))


def line() -> list[str]:
    """The command as a shell would split it."""
    text = str(errors.missing_extra("Charts need", "report"))
    start, command = text.split(" Run: ")
    assert start == "Charts need the extra 'report', which is not installed."
    return shlex.split(command)


def test_from_an_index(came_from, tmp_path, monkeypatch):
    came_from(None)
    monkeypatch.chdir(tmp_path)
    assert line() == [sys.executable, "-m", "pip", "install", "attngap[report]"]


def test_from_a_checkout_it_stays_editable(came_from, tmp_path):
    came_from({"url": tmp_path.as_uri(), "dir_info": {"editable": True}})
    assert line()[3:] == ["install", "-e", f"{tmp_path}[report]"]
    came_from({"url": tmp_path.as_uri(), "dir_info": {}})
    assert line()[3:] == ["install", f"{tmp_path}[report]"]


def test_from_a_wheel_that_is_still_there(came_from, tmp_path):
    wheel = tmp_path / "attngap 1.whl"
    came_from({"url": wheel.as_uri(), "archive_info": {}})
    assert line()[3:] == ["install", "attngap[report]"]
    wheel.touch()
    assert line()[3:] == ["install", f"{wheel}[report]"]


def test_inside_the_checkout_it_is_what_one_would_type(came_from, tmp_path, monkeypatch):
    came_from({"url": tmp_path.as_uri(), "dir_info": {"editable": True}})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv" / "bin" / "python"))
    assert line() == [str(Path(".venv/bin/python")), "-m", "pip", "install", "-e", ".[report]"]
