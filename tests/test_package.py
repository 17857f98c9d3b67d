"""The package as a whole: what it exports, how it starts, and that its documents are true."""

import ast
import inspect
import os
import re
import runpy
import subprocess
import sys
import tomllib
import types
from importlib.metadata import entry_points, version
from pathlib import Path

import pytest
import yaml

import attngap
from attngap.mechanisms import contracts

ROOT = Path(__file__).parents[1]
FUNCTIONS = {"capture", "catalogue", "diagnose", "estimate", "evaluate", "linearize", "load", "mechanism", "probe"}
FUNCTIONS |= {"save"}
OPTIONS = {"ConversionOptions", "DiagnosisOptions", "Measures"}
CLASSES = {"AttngapError", "Diagnosis", "Mechanism", "Plan", "Receipt"} | OPTIONS
PUBLIC = FUNCTIONS | CLASSES | {"ops", "theory", "__version__"}


def run(code: str) -> str:
    """In a fresh interpreter: what a user's first import does."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def python_blocks(name: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), flags=re.DOTALL)


def test_exports_exactly_the_public_api():
    assert set(attngap.__all__) == PUBLIC
    assert set(dir(attngap)) == PUBLIC


@pytest.mark.parametrize("name", sorted(FUNCTIONS | CLASSES))
def test_every_export_is_documented(name):
    thing = getattr(attngap, name)
    assert thing.__name__ == name
    assert inspect.isclass(thing) == (name in CLASSES)
    assert inspect.getdoc(thing)


def test_exports_are_typed():
    """Type checkers read the marker, and every name where the names that are resolved on first use are imported."""
    source = Path(attngap.__file__)
    assert source.with_name("py.typed").exists()
    guarded = next(node for node in ast.parse(source.read_text()).body if isinstance(node, ast.If))
    imported = {alias.name for node in guarded.body for alias in node.names}
    assert imported == PUBLIC - {"AttngapError", "__version__"}


@pytest.mark.parametrize(
    "name", ["theory.separation.law", "theory.certificates.floor", "ops.linear_attention", "mechanism", "AttngapError"]
)
def test_one_import_is_enough(name):
    assert run(f"import attngap; print(attngap.{name}.__name__)").strip() == name.rpartition(".")[2]


def test_importing_changes_nothing_global():
    """Neither how modules are found, nor the environment, nor threads."""
    watched = "len(sys.meta_path), len(sys.path_hooks), dict(os.environ), threading.active_count()"
    code = f"import os, sys, threading; before = {watched}; import attngap; print(before == ({watched}))"
    assert run(code).strip() == "True"


@pytest.mark.parametrize("name", ["softmax_attention", "linear_attention", "delta_attention", "hybrid_attention"])
def test_ops_are_exported(name):
    assert callable(getattr(attngap.ops, name))


def test_an_unknown_attribute_lists_what_there_is():
    with pytest.raises(AttributeError, match="attngap has no 'linearise'; it exports AttngapError, Conv"):
        attngap.linearise  # noqa: B018


def test_version():
    assert attngap.__version__ == version("attngap")
    command = "import sys; sys.argv = ['attngap', '--version']; import attngap.cli as c; c.main()"
    assert run(command) == f"attngap {version('attngap')}\n"


def test_the_citation_is_of_this_version():
    written = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (written["version"], written["license"])


def test_the_readme_of_the_package_index_leads_nowhere_that_is_not_there(monkeypatch):
    """No sources lie beside it: links by relative path would be broken, and `pip install .` something else."""
    hook = types.ModuleType("hatchling.metadata.plugin.interface")
    hook.MetadataHookInterface = object
    monkeypatch.setitem(sys.modules, hook.__name__, hook)
    build = runpy.run_path(str(ROOT / "hatch_build.py"))
    readme = (ROOT / "README.md").read_text()
    shown = build["standalone"](readme)
    targets = re.findall(r"\]\(([^)]*)\)", shown)
    assert targets
    assert all(target.startswith("https://") for target in targets)
    assert 'pip install "attngap[demo]"' in shown
    assert "pip install ." not in shown
    for name in set(re.findall(r"`((?:docs/)?[\w/-]+\.md)`", shown)):
        assert (ROOT / name).exists(), name
    with pytest.raises(ValueError, match="no longer says"):
        build["standalone"](readme.replace("`pip install .`", "`pip install it`"))


def test_command_is_installed():
    (script,) = (point for point in entry_points(group="console_scripts") if point.name == "attngap")
    assert script.value == "attngap.cli:main"


@pytest.mark.parametrize("module", ["attngap", "attngap.cli", "attngap.report"])
def test_starts_without_torch(module):
    heavy = run(f"import sys, {module}; print([m for m in ('torch', 'transformers', 'pandas') if m in sys.modules])")
    assert heavy.strip() == "[]"


def test_mistakes_are_one_line_and_exit_code_2():
    command = "import sys; sys.argv = ['attngap', 'mechanisms', 'gal']; import attngap.cli as c; c.main()"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "attngap: No mechanism 'gal'. Did you mean 'gla'? List them: attngap mechanisms\n"
    assert done.stdout == ""


def test_imports_point_down():
    tool = Path(sys.executable).with_name("lint-imports")
    if not tool.exists():
        pytest.skip("import-linter is not installed")
    environment = {**os.environ, "COLUMNS": "120"}
    done = subprocess.run([tool, "--no-cache"], cwd=ROOT, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout


def test_the_mechanism_in_contributing_keeps_its_word():
    """The worked example runs as printed, and `check` really looks: with a wrong claim it fails."""
    space: dict = {}
    for block in python_blocks("CONTRIBUTING.md"):
        exec(block, space)
    broken = type("Broken", (space["SquaredRelu"],), {"state_rank": lambda self, t: 1})
    with pytest.raises(contracts.BrokenContractError, match="squared-relu breaks rank_as_declared"):
        contracts.check(broken(heads=2, dim=4))


def test_the_example_in_the_readme_prints_what_it_says(capsys):
    (example,) = python_blocks("README.md")
    (printed,) = re.findall(r"```text\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    exec(example, {})
    assert capsys.readouterr().out == printed


def test_the_commands_in_the_readme_exist():
    """Verbs and options of every `attngap` line, as the command line itself knows them."""
    from typer.main import get_command

    from attngap.cli.app import app

    commands = get_command(app).commands
    lines = re.findall(r"^attngap (\w+)(.*)$", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    assert lines
    for verb, rest in lines:
        known = {flag for parameter in commands[verb].params for flag in parameter.opts}
        assert set(re.findall(r"(?<= )--?[a-z][a-z-]*", rest)) <= known


def test_contributing_names_every_family_that_exists():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    families = {base.__name__ for base in _bases()} - {"LinearState"}  # the common base of the first two
    for family in families:
        assert f"`{family}`" in text


def _bases():
    from attngap.mechanisms.base import Mechanism
    from attngap.mechanisms.catalogue import MECHANISMS

    return {base for cls in MECHANISMS for base in cls.__mro__[1:] if issubclass(base, Mechanism)}
