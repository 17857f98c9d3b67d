"""Rows of a given length against torch's normalize, its gradients included, compiled or not."""

import pytest
import torch
from torch.nn import functional as F

from attngap.ops.l2norm import l2_rescale

pytestmark = pytest.mark.usefixtures("both_ways")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("dim", [1, 5, 16, 40])
@pytest.mark.parametrize("transposed", [False, True])
def test_rows_and_gradients_are_those_of_normalize(dim, dtype, transposed):
    generator = torch.Generator().manual_seed(dim)
    x, dy = (torch.randn(2, 3, 7, dim, dtype=dtype, generator=generator) for _ in range(2))
    if transposed:  # as projections leave it: time outside heads
        x, dy = (y.transpose(1, 2).contiguous().transpose(1, 2) for y in (x, dy))
    x.requires_grad_()
    ours, theirs = l2_rescale(x, 0.25), F.normalize(x, dim=-1) / 4
    torch.testing.assert_close(ours, theirs)
    assert ours.stride() == x.stride()
    for a, b in zip(*(torch.autograd.grad(y, x, dy) for y in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_short_rows_of_half_precision_are_finite(dtype):
    """float16 has no 1e-12: a row of zeros divided by its length was undefined, and one shorter than 6e-5 infinite."""
    x = torch.tensor([[0.0, 0.0], [1e-7, 0.0], [3.0, 4.0]], dtype=dtype).view(1, 1, 3, 2).requires_grad_()
    y = l2_rescale(x, 1.0)
    torch.testing.assert_close(y.double(), F.normalize(x.double(), dim=-1), rtol=0.01, atol=0.01)
    y[:, :, 2].sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_a_row_of_zeros_stays_one():
    x = torch.zeros(1, 1, 2, 4, requires_grad=True)
    out = l2_rescale(x, 1.0)
    assert torch.equal(out, torch.zeros_like(x))
    assert torch.autograd.grad(out.sum(), x)[0].isfinite().all()
