"""The mathematics of docs/theory.md: exact laws, certificates, and checks that try to refute them.

`attngap.theory.separation.law(...)` and `attngap.theory.certificates.floor(...)` work after `import attngap` alone.
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

__all__ = ["capacity", "certificates", "critical", "distribution", "phase", "separation", "statements"]

if TYPE_CHECKING:
    from attngap.theory import capacity, certificates, critical, distribution, phase, separation, statements


def __getattr__(name: str) -> ModuleType:
    if name in __all__:
        return importlib.import_module(f"attngap.theory.{name}")
    raise AttributeError(f"attngap.theory has no {name!r}; it exports {', '.join(__all__)}")


def __dir__() -> list[str]:
    return __all__
