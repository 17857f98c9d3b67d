import ast
import re
import tomllib
from pathlib import Path

import pytest
from transformers import PretrainedConfig, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from attngap.errors import AttngapError
from attngap.models import compat
from attngap.models.mixed_layer import MixedLayer, MixedLayerBesideState

SOURCES = Path(compat.__file__).parents[1]


@pytest.mark.parametrize("name", compat.PRIVATE)
def test_every_private_name_is_there_and_used_in_one_file(name):
    assert hasattr(PretrainedConfig(), name) or hasattr(PreTrainedModel, name)
    users = [path.name for path in SOURCES.rglob("*.py") if name in path.read_text(encoding="utf-8")]
    assert users == ["compat.py"]


def test_internals_of_the_cache_are_imported_in_one_file():
    inner = re.compile(r"transformers\.(cache_utils|masking_utils|integrations|modeling_utils)")
    for path in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and inner.match(node.module or ""):
                assert path.name == "compat.py", f"{path}: {node.module}"


@pytest.mark.parametrize("layer", [MixedLayer, MixedLayerBesideState])
def test_our_cache_layers_have_all_that_transformers_calls(layer):
    assert not layer.__abstractmethods__
    for base in (CacheLayerMixin, LinearAttentionCacheLayerMixin)[: 1 if layer is MixedLayer else 2]:
        assert not {name for name in vars(base) if not name.startswith("_")} - set(dir(layer))


def test_versions_outside_the_range_are_told():
    compat.check_versions({"transformers": "5.16.0", "torch": "2.6.0+cpu"})
    with pytest.raises(AttngapError, match=r"transformers from 5.16 to below 6, found 5.2.0. Run: pip install"):
        compat.check_versions({"transformers": "5.2.0"})
    with pytest.warns(UserWarning, match=r"torch from 2.6 to below 3, found 3.1, which has not been tried"):
        compat.check_versions({"torch": "3.1"})


def test_the_package_asks_for_the_versions_that_are_supported():
    asked = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["dependencies"]
    for name, (least, beyond) in compat.SUPPORTED.items():
        assert f"{name}>={least},<{beyond}" in asked
