"""The compiled product of a few rows, as a function of tensors."""

import torch
from torch import Tensor
from torch.nn import functional as F

from attngap.ops import native, pages
from attngap.ops.native.scratch import lay_out, no_scratch
from attngap.ops.native.tensors import is_memory
from attngap.ops.processor import INTEL, maker

MOST_ROWS = 4  # of x: torch's products catch up with more
# With more threads torch reads memory faster than one thread does. A core of an Intel Xeon has half of what two get (10
# of 19 GB/s), a core of an AMD EPYC nearly all (36 to 40 of 46).
MOST_THREADS, MOST_OF_INTEL = 4, 1
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
            and all(is_memory(x) and x.dtype == self.kind for x in (weight, bias) if x is not None)
        )
        if self.fits:
            from attngap.ops.thin import kernels

            self.kernel, self.address = kernels.multiply, weight.data_ptr()
            self.halved = None if self.kind == torch.float32 else 1
            self.scratch = no_scratch()
            self.added = None if bias is None else bias.detach().float()
            self.added_address = 0 if self.added is None else self.added.data_ptr()
            self.written = None if bias is None else (bias._version, bias.data_ptr())

    def holds(self, weight: Tensor, bias: Tensor | None) -> bool:
        """Whether these are still the same, where they were."""
        if weight is not self.weight or bias is not self.bias or weight.dtype != self.kind:
            return False
        if not self.fits:
            return True
        return weight.data_ptr() == self.address and (bias is None or (bias._version, bias.data_ptr()) == self.written)

    def takes(self, x: Tensor) -> bool:
        """A few plain rows where one thread reads memory as fast as torch's do."""
        return (
            self.fits
            and x.dtype == self.kind
            and 0 < x.numel() <= self.most
            and x.shape[-1] == self.width
            and type(x) is Tensor
            and x.is_cpu
            and not x.is_neg()
            and torch.get_num_threads() <= (MOST_OF_INTEL if maker() == INTEL else MOST_THREADS)
        )

    def times(self, x: Tensor) -> Tensor:
        """x W^T + bias with sums in float32, in the type of x."""
        shape = x.shape
        if x.dtype != torch.float32 or not x.is_contiguous():
            x = x.float().contiguous()
        size = (*shape[:-1], self.outputs)
        guarded = self.scratch.guards  # as they are where kernels are debugged
        out = pages.empty(size, torch.float32, x.device) if guarded else x.new_empty(size)
        sizes = x.numel() // self.width, self.width, self.outputs
        given = self.address, self.added_address, x.data_ptr(), out.data_ptr(), *sizes, self.halved
        native.run_alone(self.kernel, given, torch.float32, self.outputs, self.scratch)
        return out if self.halved is None else out.to(self.kind)


class ThinGated:
    """The weights of down(silu(gate(x)) * up(x)), looked at once for the many tokens to come."""

    def __init__(self, gate: ThinWeight, up: ThinWeight, down: ThinWeight):
        self.gate, self.up, self.down = gate, up, down
        given = (gate, up, down)
        sizes = (gate.width, gate.outputs) == (up.width, up.outputs) and gate.outputs == down.width
        self.fits = sizes and all(part.fits and part.kind == torch.float32 for part in given)
        if self.fits:
            from attngap.ops.thin import kernels

            self.kernel = kernels.gated
            middle = MOST_ROWS * gate.outputs * torch.float32.itemsize
            self.scratch = lay_out(kernels.GatedRoom, {"opened": middle, "raised": middle})
            self.addresses = tuple((part.address, part.added_address) for part in given)

    def holds(self, gate: ThinWeight, up: ThinWeight, down: ThinWeight) -> bool:
        """Whether these are still the same."""
        return gate is self.gate and up is self.up and down is self.down

    def takes(self, x: Tensor) -> bool:
        return self.fits and self.gate.takes(x)

    def times(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        size = (*x.shape[:-1], self.down.outputs)
        guarded = self.scratch.guards  # as they are where kernels are debugged
        out = pages.empty(size, torch.float32, x.device) if guarded else x.new_empty(size)
        gate, outputs = self.gate, self.down.outputs
        sizes = x.numel() // gate.width, gate.width, gate.outputs, outputs
        given = *self.addresses, x.data_ptr(), out.data_ptr(), *sizes, self.scratch.room
        native.run_alone(self.kernel, given, torch.float32, outputs, self.scratch)
        return out


@torch.no_grad()
def thin_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`, compiled where x has a few rows; without gradients."""
    known = ThinWeight(weight, bias)
    return known.times(x) if native.on() and known.takes(x) else F.linear(x, weight, bias)
