"""Let transformers' Auto classes open converted folders as soon as attngap is imported, without importing either.

`import attngap` must stay instant, so nothing is registered until transformers' own registry of models is loaded: if it
is there already, at once; otherwise right after somebody imports it.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from types import ModuleType
from typing import Any

REGISTRY = "transformers.models.auto.modeling_auto"


def install() -> None:
    """Register now or on the import of the registry."""
    if REGISTRY in sys.modules:
        _register()
    elif not any(isinstance(finder, _Watcher) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watcher())


def _register() -> None:
    """Importing the module registers; where that import is what loaded the registry, it registers when it is done."""
    importlib.import_module("attngap.models.auto")


class _Watcher(importlib.abc.MetaPathFinder):
    """Steps aside at the first import of the registry, and wraps its loader."""

    def find_spec(
        self, fullname: str, path: Any, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != REGISTRY:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, inner: Any):
        self.inner = inner

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.inner.exec_module(module)
        _register()
