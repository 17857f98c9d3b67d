"""The compiled short convolution as functions of tensors."""

from torch import Tensor

from attngap.ops import native, pages
from attngap.ops.native.scratch import Scratch
from attngap.ops.native.tensors import as_rows


def forward(x, taps) -> Tensor:
    """silu of the convolution; x (b, t, c) and taps (n, c) contiguous."""
    from attngap.ops.convolution import kernels

    out = pages.empty_like(x)
    inputs, (to,) = kernels.Inputs(*as_rows(x[:, None], taps[None, None])), as_rows(out[:, None])
    native.run(kernels.forward, (inputs, to), x.dtype, _vectors(x), x.numel(), Scratch(None, 0))
    return out


def backward(x, taps, d_out) -> tuple[Tensor, Tensor]:
    """The gradients of x and taps."""
    from attngap.ops.convolution import kernels

    dx, d_taps = pages.empty_like(x), x.new_empty(len(x), 1, *taps.shape)
    inputs, (above,) = kernels.Inputs(*as_rows(x[:, None], taps[None, None])), as_rows(d_out[:, None])
    to = kernels.ConvolutionGradRows(*as_rows(dx[:, None], d_taps))
    scratch = Scratch(None, 2 * taps.numel() * taps.element_size())
    native.run(kernels.backward, (inputs, above, to), x.dtype, _vectors(x), 2 * x.numel(), scratch)
    return dx, d_taps.sum((0, 1))


def _vectors(x: Tensor) -> int:
    """Of channels, in all sequences."""
    return x.shape[0] * x.shape[2] * x.element_size() // native.VECTOR
