"""The examples in docstrings print what they say."""

import doctest
import importlib.util
import pkgutil
from pathlib import Path

import pytest

import attngap

ROOT = Path(attngap.__file__).parent
NAMES = [module.name for module in pkgutil.walk_packages([str(ROOT)], "attngap.")]
SOURCES = {name: Path(importlib.util.find_spec(name).origin).read_text("utf-8") for name in NAMES}
WITH_EXAMPLES = [name for name, source in SOURCES.items() if ">>>" in source]


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples(name):
    module = importlib.import_module(name)
    found = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert found.failed == 0


def test_few_examples_are_skipped():
    """Only those that need real weights, so that the others are not skipped by habit."""
    skipping = {name for name in WITH_EXAMPLES if "+SKIP" in SOURCES[name]}
    calls = {
        "conversion.evaluate",
        "conversion.linearize",
        "costs.estimate",
        "diagnosis.diagnose",
        "models.capture",
        "models.load",
        "models.prefill",
        "models.save",
    }
    assert skipping == {f"attngap.{name}" for name in calls}
