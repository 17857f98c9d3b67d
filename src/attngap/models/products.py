"""What of a converted model is compiled beside its attention: linear layers, gated MLPs and RMS norms.

A module gets a `forward` of its own, which computes a token by one compiled call where that may be, and leaves all else
to the module's class.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from attngap.models.gated import Gated, gated_of
from attngap.models.linear import Product
from attngap.models.norms import Norm, norm_of

QUICK = (Product, Gated, Norm)


def compile_products(model: nn.Module) -> None:
    """Of every linear layer that is torch's own, and what stands around them; quantized ones know better."""
    for part in model.modules():
        _compile(part)


def _compile(part: nn.Module) -> bool:
    """Whether there was something to compile."""
    if "forward" in vars(part):
        return False
    quick = Product(part) if type(part) is nn.Linear else norm_of(part) or gated_of(part)
    if quick is not None:
        vars(part)["forward"] = quick
    return quick is not None


def plain_products(model: nn.Module) -> None:
    """torch's own again."""
    for part in model.modules():
        if isinstance(vars(part).get("forward"), QUICK):
            del vars(part)["forward"]


@contextmanager
def quick_products(*models: nn.Module) -> Iterator[None]:
    """In here these models multiply as converted ones do, whatever they are; afterwards as before."""
    changed = [part for model in models for part in model.modules() if _compile(part)]
    try:
        yield
    finally:
        for part in changed:
            vars(part).pop("forward", None)
