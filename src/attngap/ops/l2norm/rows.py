"""Rows brought to a given length."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from attngap.ops import native
from attngap.ops.check import accumulate_dtype
from attngap.ops.l2norm import compiled
from attngap.ops.native.tensors import plain_grads
from attngap.ops.uncompiled import uncompiled


@uncompiled
def l2_rescale(x: Float[Tensor, "b h t d"], length: float) -> Float[Tensor, "b h t d"]:
    """length x / |x|, where |x| is at least 1e-12. The backward cannot be differentiated again."""
    return _Rescale.apply(x, length)


class _Rescale(torch.autograd.Function):
    """dx = r (dy - y (y . dy) / length^2) with r = length / |x|: torch's `normalize` goes over x some ten times."""

    @staticmethod
    def forward(ctx, x, length):
        if _fits(x):
            y, r = compiled.forward(x, length)
        else:
            # In float32 where x is in half precision: float16 has no 1e-12, and rows below 6e-5 would be infinite.
            rows = x.to(accumulate_dtype(x.dtype))
            r = length / torch.linalg.vector_norm(rows, dim=-1, keepdim=True).clamp_min(1e-12)
            y = (rows * r).to(x.dtype)
        ctx.save_for_backward(y, r)
        ctx.length = length
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        y, r = ctx.saved_tensors
        grads = plain_grads(*grads)
        if _fits(y, grads[0]):
            return compiled.backward(y, r, grads[0], ctx.length), None
        rows, grad = y.to(r.dtype), grads[0].to(r.dtype)
        along = (rows * grad).sum(-1, keepdim=True) * (-1 / ctx.length**2)
        return torch.addcmul(grad, rows, along).mul_(r).to(y.dtype), None


def _fits(*tensors: Tensor) -> bool:
    first = tensors[0]
    return first.dtype in (torch.float32, torch.float64) and native.usable(*tensors, state=first[:, :, :1])
