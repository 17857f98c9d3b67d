"""RMS norms of a converted model: a token's by one compiled call, where torch takes five operations."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from attngap.mechanisms.calls import possible
from attngap.models.tried import bare_copy, computes, may_be_tried
from attngap.ops.rms import RmsWeight


class Norm:
    """What a module computes that was found to be an RMS norm, compiled for a token (b, 1, ..., width).

    Prompts are the module's, as they were: what is measured on them should not depend on which modules are hooked.
    """

    def __init__(self, module: nn.Module, eps: str):
        self.module, self.eps = module, eps
        self.known: RmsWeight | None = None
        self.__signature__ = inspect.signature(module.forward)  # for whoever asks what it takes

    def __call__(self, *args: Any, **options: Any) -> Tensor:
        token = len(args) == 1 and not options and isinstance(x := args[0], Tensor) and x.ndim > 2 and x.shape[1] == 1
        if token and possible():
            own = vars(self.module)
            weight, eps, known = own["_parameters"].get("weight"), own.get(self.eps), self.known
            if type(weight) is nn.Parameter and type(eps) is float:
                if known is None or not known.holds(weight) or known.eps != eps:
                    known = self.known = RmsWeight(weight, eps)
                if known.takes(x):
                    return known.normalized(x)
        return type(self.module).forward(self.module, *args, **options)

    def __getstate__(self) -> dict:
        return vars(self) | {"known": None}


def norm_of(module: nn.Module) -> Norm | None:
    """What the module computes, if weight * x / sqrt(mean(x^2) + eps) is it and eps one of its attributes.

    Many multiply by weight + 1, and some subtract a mean. So it is tried on numbers, with another weight, which is a
    copy's.
    """
    if "weight" not in module._parameters or not may_be_tried(module):
        return None
    weight, own = module._parameters.get("weight"), vars(module)
    more = len(module._parameters) > 1 or module._modules or module._buffers
    if type(weight) is not nn.Parameter or weight.ndim != 1 or len(weight) < 2 or more:
        return None
    if weight.device.type != "cpu":  # where nothing could be compiled, and numbers to try may not be had
        return None
    names = [name for name, value in own.items() if type(value) is float and 0 < value < 1]
    return next((Norm(module, name) for name in names if _is_rms(module, len(weight), own[name])), None)


@torch.no_grad()
def _is_rms(module: nn.Module, width: int, eps: float) -> bool:
    given: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}  # whatever is the default here
    weight = torch.linspace(-0.5, 1.5, width, **given)
    tried = bare_copy(module, _parameters={"weight": nn.Parameter(weight, requires_grad=False)})
    # Rows so small that eps decides, and others; no row has a mean of zero.
    sizes = torch.tensor([[1.0], [30.0], [eps**0.5], [eps]], **given)
    x = sizes * torch.linspace(-1, 2, width, **given).roll(width // 3)
    expected = weight * (x * (x.square().mean(-1, keepdim=True) + eps).rsqrt())
    return computes(tried, x[None], expected[None], sizes)
