"""Tensors as kernels know them, and the numbers that describe a call.

Kernels know addresses only, so every tensor must have a name that outlives the call.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from attngap.errors import AttngapError
from attngap.ops import native, pages
from attngap.ops.native.scratch import Scratch, lay_out
from attngap.ops.uncompiled import plain_tensor


class Rows(NamedTuple):
    """A tensor (batch, heads, length, width), its strides in bytes."""

    address: int
    batch: int
    heads: int
    length: int
    width: int
    by_batch: int
    by_head: int
    by_row: int
    by_column: int


def as_rows(*tensors: Tensor | None) -> list[Any]:
    """As kernels know them; None stays None."""
    return [None if x is None else _rows(x) for x in tensors]


def _rows(x: Tensor) -> Rows:
    """The last check before an address is handed on; what ops are given was made plain at their door."""
    if x.device.type != "cpu" or x.ndim != 4 or x.is_neg() or x.data_ptr() == 0:
        raise AttngapError(
            f"a compiled kernel needs memory with four axes on the CPU, got {tuple(x.shape)} on {x.device}"
        )
    size = x.element_size()
    by_batch, by_head, by_row, by_column = x.stride()
    batch, heads, length, width = x.shape
    strides = by_batch * size, by_head * size, by_row * size, by_column * size
    return Rows(x.data_ptr(), batch, heads, length, width, *strides)


def is_memory(x: Tensor) -> bool:
    """Numbers on the CPU without gaps, and nothing else."""
    plain = type(x) in (Tensor, torch.nn.Parameter) and x.device.type == "cpu" and x.layout == torch.strided
    return plain and x.is_contiguous() and not x.is_neg() and x.data_ptr() != 0


def plain_grads(*grads: Tensor | None) -> tuple[Tensor | None, ...]:
    """What autograd hands back, as memory of its own."""
    return tuple(None if x is None else plain_tensor("a gradient", x) for x in grads)


def mask_rows(q: Tensor, mask: Tensor | None) -> Tensor:
    """(b, 1, t, 1)."""
    b, _, t, _ = q.shape
    return torch.ones((), dtype=torch.bool).expand(b, 1, t, 1) if mask is None else mask[:, None, :, None]


def state_scratch(room: Any, q: Tensor, v: Tensor) -> Scratch:
    """For kernels that walk over two tokens at a time: pairs of rows, the state, and its transpose."""
    r, dv = row_bytes(q), row_bytes(v)
    sizes = {name: 2 * max(r, dv) for name in room._fields}
    return lay_out(room, sizes | {"state": q.shape[-1] * dv, "transposed": v.shape[-1] * r})


def row_bytes(x: Tensor) -> int:
    """Of a row, filled up to whole panels."""
    return -(-x.shape[-1] * x.element_size() // native.PANEL) * native.PANEL


def lane_count(x: Tensor) -> int:
    return x.shape[0] * x.shape[1]


def update_count(q: Tensor, v: Tensor) -> int:
    return q.numel() * v.shape[-1]


def decay_grad(log_decay: Tensor | None, wanted: bool) -> Tensor | None:
    """A place for its gradient; one number for all of it if nobody wants it."""
    if log_decay is None or wanted:
        return None if log_decay is None else pages.empty_like(log_decay)
    return log_decay.new_empty(()).expand(log_decay.shape)
