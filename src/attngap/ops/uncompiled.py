"""How ops behave where torch would change them: under torch.compile and under autocast they run as they are."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

Op = TypeVar("Op", bound=Callable)


def uncompiled(op: Op) -> Op:
    """torch.compiler.disable, and no autocast inside: an op accumulates in the type it says, whatever its inputs are.

    The signature stays visible to type checkers.
    """

    @functools.wraps(op)
    def plain(*args: Any, **kwargs: Any) -> Any:
        device = next((x.device.type for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), "cpu")
        if not torch.is_autocast_enabled(device):
            return op(*args, **kwargs)
        with torch.autocast(device, enabled=False):
            return op(*args, **kwargs)

    return torch.compiler.disable(plain)  # pyright: ignore[reportReturnType]
