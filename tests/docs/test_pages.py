"""The documents are true: snippets run, commands exist, links lead somewhere, generated pages are fresh."""

import importlib.util
import re
import shlex
from pathlib import Path

import pytest
import typer.main
from markdown.extensions.toc import slugify

from attngap.cli.app import app
from tests import zoo

ROOT = Path(__file__).parents[2]
PAGES = sorted(path for path in (ROOT / "docs").rglob("*.md") if "reference" not in path.parts)
UNCHECKED = ("results.md", "results-history.md", "schema.md", "probes-schema.md")
WRITTEN = [page for page in PAGES if page.name not in UNCHECKED]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def with_code(language: str) -> list:
    return [pytest.param(page, id=page.stem) for page in [*WRITTEN, ROOT / "README.md"] if blocks(page, language)]


@pytest.mark.parametrize("page", [param for param in with_code("python") if param.id != "README"])
def test_python_snippets_run_in_order(page, tmp_path, monkeypatch):
    """As printed, in one namespace a page; the named model is a tiny one here, so that seconds are enough."""
    monkeypatch.chdir(tmp_path)
    model = zoo.tiny("llama")
    model.config.max_position_embeddings = 4096
    monkeypatch.setattr("attngap.models.load.load", lambda *_, **__: (model, zoo.tokenizer()))
    space: dict = {"__name__": page.stem}
    for block in blocks(page, "python"):
        exec(compile(block, str(page), "exec"), space)


@pytest.mark.parametrize("page", with_code("sh"))
def test_commands_exist_with_the_options_shown(page):
    commands = typer.main.get_command(app)
    for line in "\n".join(blocks(page, "sh")).splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["attngap"]:
            command, rest = commands, words[1:]
            while hasattr(command, "commands"):
                assert rest[0] in command.commands, line
                command, rest = command.commands[rest[0]], rest[1:]
            known = {flag for parameter in command.params for flag in parameter.opts}
            assert {word.split("=")[0] for word in rest if word.startswith("-")} <= known, line


@pytest.mark.parametrize("page", [*WRITTEN, ROOT / "README.md"], ids=lambda page: page.stem)
def test_links_and_pictures_are_there(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.stem)
def test_links_to_a_heading_find_it(page):
    for target, heading in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text(encoding="utf-8")):
        assert heading in headings(page.parent / target if target else page), f"{page.name}: {target}#{heading}"


def headings(page: Path) -> set[str]:
    """Their anchors, as the site has them."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return {slugify(re.sub(r"[`*]", "", line), "-") for line in re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)}


def test_every_page_is_in_the_navigation():
    listed = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8")))
    assert {str(page.relative_to(ROOT / "docs")) for page in PAGES} <= listed


def test_pictures_are_small():
    for picture in (ROOT / "docs" / "images").iterdir():
        assert picture.stat().st_size < 300_000, picture.name


def test_generated_pages_are_fresh():
    spec = importlib.util.spec_from_file_location("reference", ROOT / "tools" / "reference.py")
    reference = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reference)
    for page, content in reference.pages().items():
        assert page.read_text(encoding="utf-8") == content, f"{page.name} is stale. Run: make docs"


def test_the_switch_in_concepts_is_where_its_picture_has_it():
    """The page once said 0.618 beside a picture that switches at 0.53."""
    from attngap.theory.critical import concentration_needle, critical_needle
    from attngap.theory.separation import law

    page = (ROOT / "docs" / "concepts.md").read_text()
    setting = {"n": round(10**6 / 512) * 512, "d": 514, "a0": 0.05, "b": 0.5, "m": 40}
    chances = {needle: law("softmax", a1=needle, **setting).success for needle in (0.5, 0.53, 0.56)}
    assert chances[0.5] < 0.05 < chances[0.53] < 0.95 < chances[0.56]
    assert "never to always near 0.53" in page
    assert f"puts it at {critical_needle('softmax', 1e6, 0.5):.3f} (solid line)" in page
    assert f"toward {concentration_needle():.3f} (dashed)" in page


def test_a_picture_that_a_page_describes_is_on_it():
    """The first page once described a picture that was not there."""
    for page in (ROOT / "README.md", ROOT / "docs" / "index.md"):
        assert re.findall(r"!\[[^\]]{40,}\]\([^)]*report\.png\)", page.read_text()), page
