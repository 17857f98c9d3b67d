"""attngap tells you which attention heads need softmax, proves why, and replaces the rest."""

import importlib
from importlib.metadata import version as _version
from typing import TYPE_CHECKING, Any

from attngap import autoload

__version__ = _version("attngap")
__all__ = ["catalogue", "diagnose", "linearize", "load", "mechanism", "ops", "probe", "save", "theory"]

# Names are resolved on first use, so that `attngap --help` does not wait for torch.
_HOME = {
    "catalogue": "attngap.mechanisms.catalogue",
    "mechanism": "attngap.mechanisms.catalogue",
    "load": "attngap.models.load",
    "save": "attngap.models.save",
    "diagnose": "attngap.diagnosis.diagnose",
    "linearize": "attngap.conversion.linearize",
    "probe": "attngap.probes.probe",
}
_PACKAGES = ("ops", "theory")

if TYPE_CHECKING:
    from attngap import ops, theory
    from attngap.conversion.linearize import linearize
    from attngap.diagnosis.diagnose import diagnose
    from attngap.mechanisms.catalogue import catalogue, mechanism
    from attngap.models.load import load
    from attngap.models.save import save
    from attngap.probes.probe import probe


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"attngap.{name}")
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"attngap has no {name!r}; it exports {', '.join(__all__)}")


def __dir__() -> list[str]:
    return __all__


autoload.install()
