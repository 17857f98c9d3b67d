"""The cos and sin of rotary positions, noted as a model hands them to its attention modules."""

import inspect
import weakref
from typing import Any

from torch import Tensor, nn

from attngap.mechanisms.rotary import Angles

GIVEN = "position_embeddings"  # what transformers calls them

_ANGLES: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()


def note_angles(model: nn.Module) -> list[Any]:
    """Hooks that note, for `angles_of`, what every attention module inside is given."""
    hooks = []
    for module in model.modules():
        names = list(inspect.signature(module.forward).parameters)
        if GIVEN in names:
            hooks.append(module.register_forward_pre_hook(_Note(names.index(GIVEN)), with_kwargs=True))
    return hooks


class _Note:
    def __init__(self, place: int):
        self.place = place

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        _ANGLES[module] = args[self.place] if len(args) > self.place else kwargs.get(GIVEN)


def angles_of(module: nn.Module) -> Angles | None:
    """The cos and sin of the module's present call, (b, t, w) each; None where it has none of that form."""
    given = _ANGLES.get(module)
    if not isinstance(given, tuple) or len(given) != 2:
        return None
    cos, sin = given
    plain = all(isinstance(x, Tensor) and x.ndim == 3 and not x.is_complex() for x in (cos, sin))
    return (cos, sin) if plain else None
