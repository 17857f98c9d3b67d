"""The ops under the mechanisms: the fast ones where they exist, their definitions until then."""

import importlib
from typing import Any

from attngap.ops import naive


def _op(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(f"attngap.ops.{module}"), name)
    except (ImportError, AttributeError):
        slow = getattr(naive, name)
        return lambda *args, chunk=None, **options: slow(*args, **options)


delta_attention = _op("delta", "delta_attention")
