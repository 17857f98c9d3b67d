"""Gated MLPs of a converted model: a token's by one compiled call instead of three products and two operations.

Of many rows what stands between the products is done in place: fresh memory for it takes a sixth of the time of all.
"""

import inspect
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import _has_any_global_hook

from attngap.mechanisms.calls import possible
from attngap.models.linear import Product
from attngap.models.tried import bare_copy, computes, may_be_tried
from attngap.ops.thin import ThinGated

TRIED = 16, 32  # widths that a module is tried with
Names = tuple[str, str, str]


class Gated:
    """What a module computes that was found to be down(silu(gate(x)) * up(x)), quicker where nobody looks inside."""

    def __init__(self, module: nn.Module, names: Names, activation: str):
        self.module, self.names, self.activation = module, names, activation
        self.silu = module._modules[activation]
        self.known: ThinGated | None = None
        self.__signature__ = inspect.signature(module.forward)  # for whoever asks what it takes

    def __call__(self, *args: Any, **options: Any) -> Tensor:
        if len(args) == 1 and not options and isinstance(x := args[0], Tensor) and x.ndim > 1:
            products = self._products() if possible() else None
            if products is not None and x.shape[-2] > 1 and type(x) is Tensor:
                gate, up, down = products
                return down(F.silu(gate(x), inplace=True).mul_(up(x)))
            known = self._thin(products) if products is not None and x.shape[-2] == 1 else None
            if known is not None and known.takes(x):
                return known.times(x)
        return type(self.module).forward(self.module, *args, **options)

    def _products(self) -> list[Product] | None:
        """What gate, up and down compute; None where some part must be called itself."""
        parts = vars(self.module)["_modules"]
        silu = parts.get(self.activation)
        if len(parts) != 4 or silu is not self.silu or _is_watched(silu) or _has_any_global_hook():
            return None
        found = []
        for name in self.names:
            part = parts.get(name)
            own = vars(part).get("forward") if type(part) is nn.Linear and not _is_watched(part) else None
            if not isinstance(own, Product):
                return None
            found.append(own)
        return found

    def _thin(self, products: list[Product]) -> ThinGated:
        """The three weights as they are now."""
        found = [product.thin() for product in products]
        known = self.known
        if known is None or not known.holds(*found):
            known = self.known = ThinGated(*found)
        return known

    def __getstate__(self) -> dict:
        return vars(self) | {"known": None}


def _is_watched(part: nn.Module) -> bool:
    return bool(part._forward_hooks or part._forward_pre_hooks)


def gated_of(module: nn.Module) -> Gated | None:
    """What the module computes, if down(silu(gate(x)) * up(x)) is it and these are all its children.

    Which is which is tried on numbers, with other weights, in a copy that is much smaller.
    """
    if len(module._modules) != 4 or not may_be_tried(module):
        return None
    linear = [name for name, part in module._modules.items() if type(part) is nn.Linear]
    others = [name for name in module._modules if name not in linear]
    if len(linear) != 3 or module._parameters or module._buffers:
        return None
    if any(each.device.type != "cpu" for each in module.parameters()):  # where nothing could be compiled
        return None
    silu = module._modules[others[0]]
    if silu is None or _is_watched(silu):  # its hooks would see what it is tried on
        return None
    if any(True for _ in itertools.chain(silu.parameters(), silu.buffers(), silu.children())):
        return None
    names = (names for names in itertools.permutations(linear, 3) if _fit(module, names) and _is_gated(module, names))
    return next((Gated(module, each, others[0]) for each in names), None)


def _layers(module: nn.Module, names: Names) -> Iterator[nn.Linear]:
    for name in names:
        part = module._modules[name]
        assert isinstance(part, nn.Linear)
        yield part


def _fit(module: nn.Module, names: Names) -> bool:
    gate, up, down = _layers(module, names)
    inner, outer = {gate.out_features, up.out_features, down.in_features}, {gate.in_features, up.in_features}
    return len(inner) == len(outer) == 1


@torch.no_grad()
def _is_gated(module: nn.Module, names: Names) -> bool:
    width, middle = TRIED
    sizes = ((width, middle), (width, middle), (middle, width))
    layers = [_small(part, *size, i) for i, (part, size) in enumerate(zip(_layers(module, names), sizes, strict=True))]
    tried = bare_copy(module, _modules=module._modules | dict(zip(names, layers, strict=True)))
    x = torch.linspace(-3, 2, 2 * width, dtype=torch.float32, device="cpu").view(1, 2, width)
    gate, up, down = layers
    expected = down(F.silu(gate(x)) * up(x))
    return computes(tried, x, expected)


def _small(part: nn.Linear, width: int, outputs: int, seed: int) -> nn.Linear:
    """A layer with numbers of its own: no random ones, which would change what is drawn after it."""
    found = nn.Linear(width, outputs, bias=part.bias is not None, device="meta")
    numbers = torch.arange(seed, seed + (width + 1) * outputs, dtype=torch.float32, device="cpu").mul(1.7 + seed).sin()
    found.weight = nn.Parameter(numbers[outputs:].view(outputs, width), requires_grad=False)
    if part.bias is not None:
        found.bias = nn.Parameter(numbers[:outputs], requires_grad=False)
    return found
