"""RMS norms of a few rows, against torch's."""

import pytest
import torch
from torch.nn import functional as F

from attngap.errors import AttngapError
from attngap.ops import native
from attngap.ops.rms import RmsWeight
from attngap.ops.rms import compiled as rms

pytestmark = pytest.mark.skipif(not native.available(), reason="needs numba")


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(1, 1, 16), (1, 1, 576), (3, 1, 80), (1, 1, 9, 64), (2, 3, 208)])
@pytest.mark.parametrize("size", [1.0, 1e-3, 1e-20, 1e15])
def test_equals_torch(shape, size):
    x, weight = size * drawn(*shape), drawn(shape[-1], seed=1)
    known = RmsWeight(weight, 1e-6)
    assert known.takes(x)
    exact = F.rms_norm(x.double(), shape[-1:], weight.double(), 1e-6).float()
    torch.testing.assert_close(known.normalized(x), exact, atol=0, rtol=1e-6)


def test_no_number_and_infinity_are_torchs():
    x = drawn(3, 1, 32)
    x[0, 0, 3], x[1, 0, 5] = torch.nan, torch.inf
    weight = drawn(32, seed=1)
    found, expected = RmsWeight(weight, 1e-6).normalized(x), F.rms_norm(x, (32,), weight, 1e-6)
    torch.testing.assert_close(found, expected, equal_nan=True)


@pytest.mark.parametrize(
    "x",
    [
        drawn(1, 1, 48),  # another width
        drawn(1, 1, 32).double(),
        drawn(1, 1, 32).bfloat16(),
        drawn(1, 32, 2).mT,  # not row after row
        drawn(1, 1, 64)[..., ::2],
        drawn(1, 1, 32).to(torch.complex64).conj().imag,  # a lazy sign
        drawn(0, 1, 32),
        drawn(1, rms.MOST // 32 + 1, 32),
        drawn(1, 1, 32).to("meta"),
        torch.nn.Parameter(drawn(1, 1, 32)),
    ],
)
def test_what_it_does_not_take(x):
    assert not RmsWeight(drawn(32), 1e-6).takes(x)


@pytest.mark.parametrize("weight", [drawn(31), drawn(64)[::2], drawn(32).double(), drawn(32).to("meta"), drawn(0)])
def test_weights_that_are_left_to_torch(weight):
    assert not RmsWeight(weight, 1e-6).fits


def test_a_weight_that_moved_is_looked_at_again():
    weight = torch.nn.Parameter(drawn(32))
    known = RmsWeight(weight, 1e-6)
    assert known.holds(weight)
    assert not known.holds(torch.nn.Parameter(weight.detach()))
    for changed in (weight.detach().clone(), weight.detach()[:16], weight.detach().double()):
        before, weight.data = weight.data, changed
        assert not known.holds(weight)
        weight.data = before
    assert known.holds(weight)


def test_a_write_beside_the_result_is_seen(monkeypatch):
    x, known = drawn(2, 1, 32)[:1], RmsWeight(drawn(32), 1e-6)
    known.normalized(x)
    monkeypatch.setattr(torch.Tensor, "numel", lambda self: 64)  # two rows where there is one
    with pytest.raises(AttngapError, match="outside a result"):
        known.normalized(x)
