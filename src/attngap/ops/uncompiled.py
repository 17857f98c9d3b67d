"""How ops behave under torch.compile: they run as they are, between compiled parts."""

from collections.abc import Callable
from typing import TypeVar

import torch

Op = TypeVar("Op", bound=Callable)


def uncompiled(op: Op) -> Op:
    """torch.compiler.disable, without hiding the signature from type checkers."""
    return torch.compiler.disable(op)  # pyright: ignore[reportReturnType]
