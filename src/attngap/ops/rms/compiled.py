"""Rows of a given root mean square as a function of tensors, without gradients."""

import torch
from torch import Tensor

from attngap.ops import native, pages
from attngap.ops.native.scratch import no_scratch
from attngap.ops.native.tensors import is_memory

MOST = 2**14  # numbers: torch's five operations catch up with more
WIDTH = native.VECTOR // 4  # numbers in a vector


class RmsWeight:
    """A weight (width,) as the kernel knows it, looked at once for the many tokens to come."""

    def __init__(self, weight: Tensor, eps: float):
        self.weight, self.eps, self.width, self.kind = weight, eps, len(weight), weight.dtype
        self.fits = native.available() and self.kind == torch.float32 and weight.ndim == 1 and is_memory(weight)
        self.fits = self.fits and 0 < self.width <= MOST and self.width % WIDTH == 0
        if self.fits:
            from attngap.ops.rms import kernels

            self.kernel, self.address = kernels.normalize, weight.data_ptr()
            self.scratch = no_scratch()

    def holds(self, weight: Tensor) -> bool:
        """Whether it is still the same, where it was."""
        if weight is not self.weight or weight.dtype != self.kind:
            return False
        return not self.fits or (weight.data_ptr() == self.address and weight.numel() == self.width)

    def takes(self, x: Tensor) -> bool:
        """A few plain rows."""
        return (
            self.fits
            and x.dtype == torch.float32
            and 0 < x.numel() <= MOST
            and x.shape[-1] == self.width
            and type(x) is Tensor
            and x.is_cpu
            and x.is_contiguous()
            and not x.is_neg()
        )

    def normalized(self, x: Tensor) -> Tensor:
        """weight * x / sqrt(mean(x^2) + eps)."""
        guarded = self.scratch.guards  # as they are where kernels are debugged
        out = pages.empty(x.shape, torch.float32, x.device) if guarded else torch.empty_like(x)
        rows = x.numel() // self.width
        given = self.address, x.data_ptr(), out.data_ptr(), self.width, self.eps
        native.run_alone(self.kernel, given, torch.float32, rows, self.scratch)
        return out
