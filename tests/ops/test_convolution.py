"""The short convolution against torch's own, its gradients included, compiled or not."""

import inspect

import pytest
import torch
from torch.nn import functional as F

from attngap.errors import AttngapError
from attngap.ops.convolution import short_convolution


def reference(x, taps):
    kernel = taps.flip(0).mT[:, None]  # torch's first tap is the oldest token
    return F.silu(F.conv1d(F.pad(x.mT, (len(taps) - 1, 0)), kernel, groups=x.shape[2]).mT)


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("b", "t", "c", "n"), [(2, 37, 32, 3), (1, 2, 16, 4), (3, 5, 64, 1), (2, 9, 24, 3), (1, 1, 8, 2)]
)
def test_outputs_and_gradients_are_those_of_conv1d(b, t, c, n, dtype):
    generator = torch.Generator().manual_seed(b * t + c)
    x, d_out = (torch.randn(b, t, c, dtype=dtype, generator=generator) for _ in range(2))
    taps = torch.randn(n, c, dtype=dtype, generator=generator)
    inputs = x.requires_grad_(), taps.requires_grad_()
    ours, theirs = short_convolution(*inputs), reference(*inputs)
    torch.testing.assert_close(ours, theirs)
    for a, b in zip(*(torch.autograd.grad(y, inputs, d_out) for y in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.usefixtures("both_ways")
def test_large_inputs_neither_overflow_nor_lose_a_nan():
    x = torch.tensor([-1e4, -200.0, 200.0, 1e4, torch.nan] * 16).reshape(1, 5, 16).clone().requires_grad_()
    taps = torch.ones(1, 16)
    out = short_convolution(x, taps)
    torch.testing.assert_close(out, F.silu(x), equal_nan=True)
    (d,) = torch.autograd.grad(out.nansum(), x)
    there = ~x.isnan()
    torch.testing.assert_close(d[there], (x[there] > 0).float())


def test_half_precision_gives_its_own_type():
    generator = torch.Generator().manual_seed(3)
    x, taps = torch.randn(2, 9, 32, generator=generator), torch.randn(3, 32, generator=generator)
    out = short_convolution(x.bfloat16(), taps)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), reference(x, taps), atol=0.05, rtol=0.05)


def test_the_past_alone_is_seen():
    x = torch.randn(1, 12, 16, generator=torch.Generator().manual_seed(0))
    later = x.clone()
    later[:, 7:] += 1
    taps = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
    before, after = short_convolution(x, taps), short_convolution(later, taps)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.equal(before[:, 7], after[:, 7])


def test_shapes_that_do_not_fit_are_refused():
    op = inspect.unwrap(short_convolution)  # past the shape checks that only pytest runs
    with pytest.raises(AttngapError, match=r"x must be \(b, t, c\) and taps \(n, c\) with the same c, got"):
        op(torch.zeros(1, 4, 8), torch.zeros(3, 9))
