"""The notebooks run from top to bottom, and what a cell ends with can be shown."""

import ast
import json
from pathlib import Path

import pytest

from tests import zoo

FOLDER = Path(__file__).parents[2] / "docs" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
# What readers see as HTML, where the last line of a cell is a result.
SHOWN = {
    "diagnose": ["Diagnosis", "DataFrame", "Chart", "Plan"],
    "convert": ["Receipt", "Receipt"],
    "own-mechanism": ["Result"],
}


def code_cells(path: Path) -> list[str]:
    return ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def run_cell(source: str, space: dict):
    """Run it as a notebook does; the value of its last line, if that is an expression."""
    *before, last = ast.parse(source).body
    if not isinstance(last, ast.Expr):
        before, last = [*before, last], None
    exec(compile(ast.Module(before, []), "cell", "exec"), space)
    return None if last is None else eval(compile(ast.Expression(last.value), "cell", "eval"), space)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = zoo.tiny("llama")
    model.config.max_position_embeddings = 4096
    monkeypatch.setattr("attngap.models.load.load", _loader(model))
    space: dict = {"__name__": "__main__"}
    values = [run_cell(source, space) for source in code_cells(path)]
    results = [value for value in values if hasattr(value, "_repr_html_") or hasattr(value, "_repr_mimebundle_")]
    assert [type(value).__name__ for value in results if len(repr(value)) < 100_000] == SHOWN[path.stem]


def _loader(model):
    """The named model is a tiny one; a folder is loaded as it is."""
    from attngap.models.load import load

    def find(name, **options):
        return load(name, **options) if Path(name).exists() else (model, zoo.tokenizer())

    return find


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_a_notebook_without_outputs(path):
    """Outputs would go stale, and differ on every machine."""
    book = json.loads(path.read_text())
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in book["cells"]}) == len(book["cells"])
    assert all(cell["outputs"] == [] for cell in book["cells"] if cell["cell_type"] == "code")
    assert book["cells"][0]["source"][0].startswith("# ")


def test_there_are_three_and_the_page_names_them():
    page = (FOLDER / "index.md").read_text()
    assert [path.name for path in NOTEBOOKS] == ["convert.ipynb", "diagnose.ipynb", "own-mechanism.ipynb"]
    assert all(f"({path.name})" in page for path in NOTEBOOKS)
