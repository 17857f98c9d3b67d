"""attngap tells you which attention heads need softmax, proves why, and replaces the rest.

    model, tokenizer = attngap.load("smollm2")
    diagnosis = attngap.diagnose(model, tokenizer)
    converted, receipt = attngap.linearize(model, tokenizer, keep=0.1)
    attngap.save(converted, "smollm2-linear", tokenizer=tokenizer)

What `__all__` lists is the public interface, with `attngap.ops` and `attngap.theory`; every other module may change.
"""

import importlib
import sys
from importlib.metadata import version as _version
from typing import TYPE_CHECKING, Any

from attngap.errors import AttngapError

__version__ = _version("attngap")
__all__ = [
    "AttngapError",
    "ConversionOptions",
    "Diagnosis",
    "DiagnosisOptions",
    "Measures",
    "Mechanism",
    "Plan",
    "Receipt",
    "__version__",
    "capture",
    "catalogue",
    "diagnose",
    "estimate",
    "evaluate",
    "linearize",
    "load",
    "mechanism",
    "ops",
    "probe",
    "save",
    "theory",
]

# Names are resolved on first use, so that `attngap --help` does not wait for torch.
_HOME = {
    "ConversionOptions": "attngap.conversion.options",
    "Diagnosis": "attngap.diagnosis.result",
    "DiagnosisOptions": "attngap.diagnosis.options",
    "Measures": "attngap.conversion.evaluate",
    "Mechanism": "attngap.mechanisms.base",
    "Plan": "attngap.models.plan",
    "Receipt": "attngap.conversion.receipt",
    "capture": "attngap.models.capture",
    "catalogue": "attngap.mechanisms.catalogue",
    "diagnose": "attngap.diagnosis.diagnose",
    "estimate": "attngap.costs.estimate",
    "evaluate": "attngap.conversion.evaluate",
    "linearize": "attngap.conversion.linearize",
    "load": "attngap.models.load",
    "mechanism": "attngap.mechanisms.catalogue",
    "probe": "attngap.probes.probe",
    "save": "attngap.models.save",
}
_PACKAGES = ("ops", "theory")

if TYPE_CHECKING:
    from attngap import ops, theory
    from attngap.conversion.evaluate import Measures, evaluate
    from attngap.conversion.linearize import linearize
    from attngap.conversion.options import ConversionOptions
    from attngap.conversion.receipt import Receipt
    from attngap.costs.estimate import estimate
    from attngap.diagnosis.diagnose import diagnose
    from attngap.diagnosis.options import DiagnosisOptions
    from attngap.diagnosis.result import Diagnosis
    from attngap.mechanisms.base import Mechanism
    from attngap.mechanisms.catalogue import catalogue, mechanism
    from attngap.models.capture import capture
    from attngap.models.load import load
    from attngap.models.plan import Plan
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


if "transformers.models.auto.modeling_auto" in sys.modules:
    # Its Auto classes are loaded, so telling them of converted folders costs nothing; see attngap.models.auto.
    importlib.import_module("attngap.models.auto")
