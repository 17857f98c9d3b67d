"""The compiled product of a few rows, as a function of tensors."""

import torch
from torch import Tensor
from torch.nn import functional as F

from attngap.ops import native, pages
from attngap.ops.native.scratch import lay_out

MOST_ROWS = 4  # of x: torch's products catch up with more
MOST_THREADS = 4  # with more of them torch may read memory faster than one thread does
WIDTH = native.VECTOR // 4  # numbers of x in a vector
KINDS = (torch.float32, torch.bfloat16)


class ThinWeight:
    """A weight (outputs, width) and its bias as the kernel knows them, looked at once for the many tokens to come."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        self.weight, self.bias = weight, bias
        self.kind, self.outputs, self.width = weight.dtype, *weight.shape
        self.most = MOST_ROWS * self.width
        self.fits = (
            native.available()
            and self.kind in KINDS
            and self.width % WIDTH == 0
            and all(_is_memory(x) and x.dtype == self.kind for x in (weight, bias) if x is not None)
        )
        if self.fits:
            from attngap.ops.thin import kernels

            self.kernel, self.address = kernels.multiply, weight.data_ptr()
            self.halved = None if self.kind == torch.float32 else 1
            self.scratch = lay_out(kernels.Room, {})
            self.added = None if bias is None else bias.detach().float()
            self.written = None if bias is None else bias._version

    def holds(self, weight: Tensor, bias: Tensor | None) -> bool:
        """Whether these are still the same, where they were."""
        if weight is not self.weight or bias is not self.bias or weight.dtype != self.kind:
            return False
        if not self.fits:
            return True
        return weight.data_ptr() == self.address and (bias is None or bias._version == self.written)

    def takes(self, x: Tensor) -> bool:
        """A few plain rows where one thread reads memory as fast as torch's do."""
        return (
            self.fits
            and x.dtype == self.kind
            and 0 < x.numel() <= self.most
            and x.shape[-1] == self.width
            and type(x) is Tensor
            and x.device.type == "cpu"
            and not x.is_neg()
            and torch.get_num_threads() <= MOST_THREADS
        )

    def times(self, x: Tensor) -> Tensor:
        """x W^T + bias with sums in float32, in the type of x."""
        x = x.float().contiguous()
        size = (*x.shape[:-1], self.outputs)
        guarded = self.scratch.guards  # as they are where kernels are debugged
        out = pages.empty(size, torch.float32, x.device) if guarded else torch.empty(size, dtype=torch.float32)
        bias = 0 if self.added is None else self.added.data_ptr()
        sizes = x.numel() // self.width, self.width, self.outputs
        given = self.address, bias, x.data_ptr(), out.data_ptr(), *sizes, self.halved
        native.run_alone(self.kernel, given, torch.float32, self.outputs, self.scratch)
        return out if self.halved is None else out.to(self.kind)


def _is_memory(x: Tensor) -> bool:
    """Numbers on the CPU without gaps, and nothing else."""
    plain = type(x) in (Tensor, torch.nn.Parameter) and x.device.type == "cpu" and x.layout == torch.strided
    return plain and x.is_contiguous() and not x.is_neg() and x.data_ptr() != 0


@torch.no_grad()
def thin_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`, compiled where x has a few rows; without gradients."""
    known = ThinWeight(weight, bias)
    return known.times(x) if native.on() and known.takes(x) else F.linear(x, weight, bias)
