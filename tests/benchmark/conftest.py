"""The comparison's own modules, which lie in a folder of scripts."""

import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "rivals"
NAMES = (
    "texts",
    "asking",
    "heads",
    "contexts",
    "presses",
    "conversions",
    "scores",
    "gates",
    "forms",
    "costs",
    "lolcats",
    "encoders",
    "tables",
)


@pytest.fixture(scope="module")
def rivals():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in NAMES})
