"""The cos and sin of rotary positions, noted as a model hands them to its attention modules."""

import inspect
import threading
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from attngap.mechanisms.rotary import Angles

GIVEN = "position_embeddings"  # what transformers calls them

_HERE = threading.local()  # the module that was called last in this thread, and what it was given


def note_angles(modules: Iterable[nn.Module]) -> list[Any]:
    """Hooks that note, for `angles_of`, what those of the modules are given that take angles."""
    hooks = []
    for module in modules:
        names = list(inspect.signature(module.forward).parameters)
        if GIVEN in names:
            hooks.append(module.register_forward_pre_hook(_Note(names.index(GIVEN)), with_kwargs=True))
    return hooks


class _Note:
    def __init__(self, place: int):
        self.place = place

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        _HERE.noted = module, args[self.place] if len(args) > self.place else kwargs.get(GIVEN)


def angles_of(module: nn.Module) -> Angles | None:
    """The cos and sin of the module's present call, (b, t, w) each; None where it has none of that form."""
    noted, given = getattr(_HERE, "noted", (None, None))
    if noted is not module or type(given) is not tuple or len(given) != 2:
        return None
    cos, sin = given
    for x in given:
        if not isinstance(x, Tensor) or x.ndim != 3 or x.is_complex():
            return None
    return cos, sin
