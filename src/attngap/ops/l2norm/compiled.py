"""Compiled rows of a given length as functions of tensors."""

import torch
from torch import Tensor

from attngap.ops import native
from attngap.ops.native.scratch import Scratch
from attngap.ops.native.tensors import as_rows, lane_count, row_bytes


def forward(x, length: float) -> tuple[Tensor, Tensor]:
    """The rows of x brought to a length, laid out as x is, and by what they were multiplied."""
    from attngap.ops.l2norm import kernels

    y, factors = torch.empty_like(x), x.new_empty(*x.shape[:3], 1)
    of, *to = as_rows(x, y, factors)
    native.run(kernels.forward, (of, length, *to), x.dtype, lane_count(x), x.numel(), Scratch(None, 3 * row_bytes(x)))
    return y, factors


def backward(y, factors, dy, length: float) -> Tensor:
    from attngap.ops.l2norm import kernels

    dx = torch.empty_like(y)
    *of, to = as_rows(y, factors, dy, dx)
    native.run(kernels.backward, (*of, length, to), y.dtype, lane_count(y), y.numel(), Scratch(None, 3 * row_bytes(y)))
    return dx
