"""`torch.nn.functional.linear` in single precision by oneDNN instead of MKL.

torch computes products of float32 matrices on a CPU by MKL, which uses vectors of half the width on processors of other
makers than Intel. oneDNN, which torch ships for half precision and convolutions, uses what the processor has; on one of
Intel's it is slower by a tenth. Both sum in single precision, in another order.
"""

import functools
import os
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from attngap.ops.processor import INTEL, maker

FEWEST_ROWS = 8  # of x: with fewer the time goes into reading the weight, which both do alike


@functools.cache
def available() -> bool:
    """Whether this torch has the product and it computes what it should; ATTNGAP_NATIVE=0 turns it off."""
    if os.environ.get("ATTNGAP_NATIVE") == "0" or not torch.backends.mkldnn.is_available():
        return False
    x, weight = torch.arange(64.0).view(16, 4) / 64, torch.arange(12.0).view(3, 4) / 12
    try:
        found = _multiply(x, weight, None)
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return torch.allclose(found, x @ weight.T, atol=1e-5)


def takes_dense(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Plain single precision on a CPU that MKL was not written for, enough rows, and nothing that torch transforms,
    traces or compiles.

    oneDNN reads memory by its address: a weight or bias with gaps, or of another size, is left to torch.
    """
    if not (_is_plain(x) and _is_plain(weight) and x.ndim >= 2 and weight.ndim == 2):
        return False
    outputs, width = weight.shape
    if x.shape[-1] != width or not (outputs and width) or x.numel() < FEWEST_ROWS * width:
        return False
    if not (weight.is_contiguous() or weight.T.is_contiguous()):
        return False
    if bias is not None and not (_is_plain(bias) and bias.is_contiguous() and bias.shape == (outputs,)):
        return False
    trained = weight.requires_grad or (bias is not None and bias.requires_grad)
    return not (trained and torch.is_grad_enabled()) and _may_call() and available() and maker() != INTEL


def _may_call() -> bool:
    return (
        not torch.compiler.is_compiling()
        and torch._C._get_tracing_state() is None
        and torch._C._functorch.peek_interpreter_stack() is None  # pyright: ignore[reportAttributeAccessIssue]
        and not torch.is_autocast_enabled("cpu")
    )


def dense_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + bias; by torch's own product where `takes_dense` says no. Gradients reach x."""
    if not takes_dense(x, weight, bias):
        return F.linear(x, weight, bias)
    if x.requires_grad and torch.is_grad_enabled():
        return _Dense.apply(x, weight, bias)  # pyright: ignore[reportReturnType]
    return _multiply(x, weight, bias)


class _Dense(torch.autograd.Function):
    """The weight is a constant: its gradient would need another product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        return _multiply(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        return dense_product(grads[0], weight.T), None, None


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    given = x.detach().contiguous(), weight.detach(), None if bias is None else bias.detach()
    return torch.ops.mkldnn._linear_pointwise(*given, "none", [], "")


def _is_plain(x: Tensor) -> bool:
    """Numbers of single precision in the CPU's memory, and nothing else."""
    return (
        type(x) in (Tensor, torch.nn.Parameter)
        and x.dtype == torch.float32
        and x.device.type == "cpu"
        and x.layout == torch.strided
        and not x.is_neg()
    )
