"""A short causal convolution of each channel, with SiLU."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from attngap.errors import AttngapError
from attngap.ops import native
from attngap.ops.check import shape
from attngap.ops.convolution import compiled
from attngap.ops.native.tensors import plain_grads
from attngap.ops.uncompiled import uncompiled


@uncompiled
def short_convolution(x: Float[Tensor, "b t c"], taps: Float[Tensor, "n c"]) -> Float[Tensor, "b t c"]:
    """silu(sum_j taps_j * x_{i-j}), channel by channel, tokens before the first taken as zero (2312.00752).

    Taps are taken in the type of x. One pass forward and one backward by a compiled kernel, where that can be used; its
    backward cannot be differentiated again. Elsewhere a pass for each tap.
    """
    if x.ndim != 3 or taps.ndim != 2 or x.shape[2] != taps.shape[1]:
        raise AttngapError(f"x must be (b, t, c) and taps (n, c) with the same c, got {shape(x)} and {shape(taps)}")
    taps = taps.to(x.dtype)
    if _fits(x, taps):
        return _Native.apply(x.contiguous(), taps.contiguous())
    t, past = x.shape[1], len(taps) - 1
    padded = F.pad(x, (0, 0, past, 0))
    return F.silu(sum((padded[:, past - j :][:, :t] * tap for j, tap in enumerate(taps)), torch.zeros_like(x)))


def _fits(x: Tensor, taps: Tensor) -> bool:
    """Whether the kernel can be used: it computes in the type of x, whole vectors of channels at a time."""
    whole = x.dtype in (torch.float32, torch.float64) and x.shape[2] * x.element_size() % native.VECTOR == 0
    return whole and x.numel() > 0 and native.usable(x, state=taps[None, None])


class _Native(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, taps):
        ctx.save_for_backward(x, taps)
        return compiled.forward(x, taps)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        x, taps = ctx.saved_tensors
        (grad,) = plain_grads(*grads)
        assert grad is not None  # there is one output
        return compiled.backward(x, taps, grad.contiguous())
