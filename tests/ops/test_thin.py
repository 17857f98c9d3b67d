"""Products of a few rows, against torch's."""

import pytest
import torch
from torch.nn import functional as F

from attngap.ops import native
from attngap.ops.processor import INTEL
from attngap.ops.thin import ThinGated, ThinWeight, thin_product
from attngap.ops.thin import compiled as thin

pytestmark = pytest.mark.skipif(not native.available(), reason="needs numba")


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "width", "outputs"), [(1, 16, 1), (1, 576, 33), (3, 80, 7), (4, 208, 5)])
@pytest.mark.parametrize("biased", [False, True])
def test_equals_torch(dtype, rows, width, outputs, biased):
    x, weight = drawn(rows, 1, width, dtype=dtype), drawn(outputs, width, dtype=dtype, seed=1)
    bias = drawn(outputs, dtype=dtype, seed=2) if biased else None
    assert ThinWeight(weight, bias).takes(x)
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    found = thin_product(x, weight, bias)
    assert found.dtype == dtype
    assert found.shape == exact.shape
    size = F.linear(x.double().abs(), weight.double().abs()) + 1  # what the terms of a sum come to
    assert ((found.double() - exact).abs() <= 2 * torch.finfo(dtype).eps * size).all()


def test_what_lies_around_the_weight_is_not_read():
    memory = torch.full((6 * 32 + 40,), torch.nan)
    for shift in (1, 4, 10, 17):
        weight = memory[shift : shift + 6 * 32].view(6, 32)
        weight.copy_(drawn(6, 32))
        x = drawn(1, 1, 32, seed=1)
        torch.testing.assert_close(thin_product(x, weight), F.linear(x, weight))
        weight.fill_(torch.nan)


@pytest.mark.parametrize(
    "x",
    [
        drawn(1, 5, 32),  # rows
        drawn(1, 1, 32).double(),
        drawn(1, 1, 32).to(torch.complex64).conj().imag,  # a lazy sign
        drawn(0, 1, 32),
        drawn(1, 1, 32).to("meta"),
        torch.nn.Parameter(drawn(1, 1, 32)),
    ],
)
def test_what_it_does_not_take(x):
    assert not ThinWeight(drawn(8, 32), None).takes(x)


@pytest.mark.parametrize(
    "weight",
    [
        drawn(8, 31),  # no whole vectors
        drawn(32, 8).T,
        drawn(8, 32).double(),
        drawn(8, 32).half(),
        drawn(8, 32).to("meta"),
        drawn(8, 32).to_sparse(),
        drawn(8, 32).to(torch.complex64).conj().imag,
    ],
)
def test_weights_that_are_left_to_torch(weight):
    assert not ThinWeight(weight, None).fits


def test_a_product_is_torchs_where_it_is_not_taken():
    x, weight = drawn(1, 9, 32), drawn(8, 32)
    assert torch.equal(thin_product(x, weight), F.linear(x, weight))
    with native.off():
        assert torch.equal(thin_product(x[:, :1], weight), F.linear(x[:, :1], weight))


def test_many_threads_of_torch_are_left_to_it(monkeypatch):
    known = ThinWeight(drawn(8, 32), None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: thin.MOST_THREADS + 1)
    assert not known.takes(drawn(1, 1, 32))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert known.takes(drawn(1, 1, 32))
    monkeypatch.setattr(thin, "maker", lambda: INTEL)  # whose single cores read memory at half of what two do
    assert not known.takes(drawn(1, 1, 32))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert known.takes(drawn(1, 1, 32))


def test_a_weight_that_moved_or_changed_its_bias_is_looked_at_again():
    weight, bias = torch.nn.Parameter(drawn(8, 32)), torch.nn.Parameter(drawn(8))
    known = ThinWeight(weight, bias)
    assert known.holds(weight, bias)
    with torch.no_grad():
        bias.add_(1)
    assert not known.holds(weight, bias)
    known = ThinWeight(weight, bias)
    weight.data = weight.data.clone()
    assert not known.holds(weight, bias)
    known = ThinWeight(weight, bias)
    bias.data = bias.data.clone()
    assert not known.holds(weight, bias)


def gated(width: int, middle: int, outputs: int, biased: bool = False, dtype=torch.float32) -> list[ThinWeight]:
    sizes = (width, middle), (width, middle), (middle, outputs)
    given = [(drawn(n, m, seed=i), drawn(n, seed=9 + i) if biased else None) for i, (m, n) in enumerate(sizes)]
    return [ThinWeight(w.to(dtype), None if b is None else b.to(dtype)) for w, b in given]


@pytest.mark.parametrize(("rows", "width", "middle", "outputs"), [(1, 16, 16, 1), (1, 576, 80, 33), (3, 80, 208, 7)])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("size", [1e-3, 1.0, 100.0])  # the last where exp of some leaves the numbers of float32
def test_a_gated_mlp_equals_torch(rows, width, middle, outputs, biased, size):
    parts, x = gated(width, middle, outputs, biased), size * drawn(rows, 1, width, seed=5)
    known = ThinGated(*parts)
    assert known.takes(x)
    gate, up, down = ((y.weight.double(), None if y.bias is None else y.bias.double()) for y in parts)
    exact = F.linear(F.silu(F.linear(x.double(), *gate)) * F.linear(x.double(), *up), *down)
    scale = float(exact.abs().max())
    torch.testing.assert_close(known.times(x).double(), exact, atol=1e-5 * scale, rtol=1e-5)


def test_what_is_no_number_stays_so():
    x = drawn(2, 1, 32)
    x[0, 0, 3] = torch.nan
    found = ThinGated(*gated(32, 48, 8)).times(x)
    assert found[0].isnan().all()
    assert found[1].isfinite().all()


def test_gated_mlps_that_are_left_to_torch():
    gate, up, down = gated(32, 48, 8)
    assert ThinGated(gate, up, down).fits
    other = gated(32, 64, 8)
    assert not ThinGated(gate, other[1], down).fits
    assert not ThinGated(gate, up, other[2]).fits
    assert not ThinGated(*gated(32, 40, 8)).fits  # no whole vectors
    assert not ThinGated(*gated(32, 48, 8, dtype=torch.bfloat16)).fits
    assert not ThinGated(gate, up, down).takes(drawn(1, 1, 48))
