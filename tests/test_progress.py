"""Progress shows where somebody looks: in a terminal and in a notebook, not in a script that did not ask."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from attngap import progress as module
from attngap.progress import progress


@pytest.fixture
def notebook(monkeypatch):
    """What a notebook would show, drawing by drawing."""
    drawn: list[dict[str, str]] = []

    def display(content, *, raw, display_id):
        assert raw
        assert display_id
        drawn.append(content)
        return SimpleNamespace(update=lambda content, raw: drawn.append(content))

    ipython, shown = ModuleType("IPython"), ModuleType("IPython.display")
    ipython.get_ipython = lambda: SimpleNamespace(config={"IPKernelApp": {}})
    shown.display = display
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", shown)
    monkeypatch.setattr(module, "REFRESH", 0.0)
    return drawn


def test_a_notebook_shows_a_bar_by_default(notebook, capsys):
    with progress("fitting <layers>", 4, quiet=None) as advance:
        advance(2, note="layer <1>")
    assert [content["text/plain"].split(": ")[1].split()[0] for content in notebook] == ["0/4", "2/4", "done"]
    assert 'value="2" max="4"' in notebook[1]["text/html"]
    assert 'value="4" max="4"' in notebook[2]["text/html"]  # what is done is full, however many steps it counted
    assert "layer &lt;1&gt;" in notebook[1]["text/html"]
    assert "<layers>" not in notebook[1]["text/html"]
    assert "min-width" in notebook[1]["text/html"]  # bars of stages with names of any length begin at one place
    assert capsys.readouterr() == ("", "")


def test_a_notebook_can_be_quiet(notebook):
    with progress("fitting", 4, quiet=True) as advance:
        advance()
    assert notebook == []


def test_a_script_shows_nothing_unless_asked(capsys):
    with progress("fitting", 4, quiet=None) as advance:
        advance()
    assert capsys.readouterr() == ("", "")
    with progress("fitting", 4) as advance:
        advance()
    assert capsys.readouterr().err.startswith("fitting ...\nfitting: done in ")
