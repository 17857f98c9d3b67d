"""The door of every op: what comes in as a plain tensor, and what torch may not change on the way.

Compiled kernels work on addresses, so a tensor that is not just its own memory is either made so (a lazy sign, zeros
that have no memory) or refused in one line (wrappers, other layouts, no numbers at all).
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from attngap.errors import AttngapError

Op = TypeVar("Op", bound=Callable)
PLAIN = torch._C._disabled_torch_dispatch_impl  # what types have that leave their operations to torch


def uncompiled(op: Op) -> Op:
    """torch.compiler.disable, no autocast inside, and arguments as plain tensors.

    An op accumulates in the type it says, whatever its inputs are. The signature stays visible to type checkers.
    """
    names = tuple(inspect.signature(op).parameters)

    @functools.wraps(op)
    def plain(*args: Any, **kwargs: Any) -> Any:
        if torch.jit.is_tracing():
            raise AttngapError(f"{op.__name__} cannot be traced by torch.jit: call it outside of what is traced")
        args = tuple(plain_argument(name, x) for name, x in zip(names, args, strict=False)) + args[len(names) :]
        kwargs = {name: plain_argument(name, x) for name, x in kwargs.items()}
        device = next((x.device.type for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), "cpu")
        if not torch.is_autocast_enabled(device):
            return op(*args, **kwargs)
        with torch.autocast(device, enabled=False):
            return op(*args, **kwargs)

    return torch.compiler.disable(plain)  # pyright: ignore[reportReturnType]


def plain_argument(name: str, x: Any) -> Any:
    """A tensor, or a state of tensors, as `plain_tensor` gives it; anything else as it is."""
    if isinstance(x, Tensor):
        return plain_tensor(name, x)
    if isinstance(x, dict):
        return {key: plain_argument(f"{name}[{key!r}]", value) for key, value in x.items()}
    return x


def plain_tensor(name: str, x: Tensor) -> Tensor:
    """The same numbers as memory of their own."""
    if getattr(type(x), "__torch_dispatch__", PLAIN) is not PLAIN:
        raise AttngapError(f"{name} is a {type(x).__name__}: ops compute on plain tensors")
    if torch._C._functorch.is_functorch_wrapped_tensor(x):  # pyright: ignore[reportAttributeAccessIssue]
        raise AttngapError(f"{name} is inside vmap or another transform of torch.func, which ops do not support")
    if x.layout != torch.strided or x.is_quantized:
        kind = "quantized" if x.is_quantized else str(x.layout).removeprefix("torch.")
        raise AttngapError(f"{name} is {kind}; ops compute on dense tensors: call to_dense() or dequantize()")
    if x.device.type == "meta":
        raise AttngapError(f"{name} is on the meta device, which holds no numbers: move it to a real one")
    if x._is_zerotensor():
        return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    return x.resolve_conj().resolve_neg() if x.is_conj() or x.is_neg() else x
