"""Linear layers of a converted model: one token by a compiled product, many by oneDNN's.

Decoding reads every weight once per token. torch's product of a single row does so at half the speed of memory here,
and once heads are replaced that is most of a token's time. Its product of many rows takes twice the time of oneDNN's on
processors that MKL was not written for.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeGuard

from torch import Tensor, nn
from torch.nn import functional as F

from attngap.mechanisms.calls import possible
from attngap.ops.dense import dense_product
from attngap.ops.thin import ThinWeight


class Product:
    """What a linear layer computes, compiled for the few rows of a token and by oneDNN for many, where that may be."""

    def __init__(self, module: nn.Linear):
        self.module = module
        self.known: ThinWeight | None = None

    def __call__(self, input: Tensor) -> Tensor:
        weight, bias = self.module.weight, self.module.bias
        if input.ndim < 2 or input.shape[-2] > 1 or not possible():
            return dense_product(input, weight, bias)
        known = self.known
        if known is None or not known.holds(weight, bias):
            known = self.known = ThinWeight(weight, bias)
        return known.times(input) if known.takes(input) else F.linear(input, weight, bias)

    def __getstate__(self) -> dict:
        return {"module": self.module, "known": None}


def compile_products(model: nn.Module) -> None:
    """Of every linear layer that is torch's own; others, such as quantized ones, know better what they hold."""
    for part in model.modules():
        if _is_plain(part):
            vars(part)["forward"] = Product(part)


def _is_plain(part: nn.Module) -> TypeGuard[nn.Linear]:
    return type(part) is nn.Linear and "forward" not in vars(part)


def plain_products(model: nn.Module) -> None:
    """torch's own again."""
    for part in model.modules():
        if isinstance(vars(part).get("forward"), Product):
            del vars(part)["forward"]


@contextmanager
def quick_products(*models: nn.Module) -> Iterator[None]:
    """In here these models multiply as converted ones do, whatever they are; afterwards as before."""
    changed = [part for model in models for part in model.modules() if _is_plain(part)]
    for part in changed:
        vars(part)["forward"] = Product(part)
    try:
        yield
    finally:
        for part in changed:
            vars(part).pop("forward", None)
