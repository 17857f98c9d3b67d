"""The product by oneDNN against torch's own."""

import pytest
import torch
from torch.nn import functional as F

from attngap.ops.dense import dense_product, product, takes_dense
from attngap.ops.processor import INTEL

pytestmark = pytest.mark.skipif(not product.available(), reason="this torch has no oneDNN")


@pytest.fixture
def taken(monkeypatch):
    """How many products were oneDNN's."""
    counts = {"times": 0}
    multiply = product._multiply

    def counted(*given):
        counts["times"] += 1
        return multiply(*given)

    monkeypatch.setattr(product, "_multiply", counted)
    return counts


def numbers(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [(8,), (1, 300), (2, 33), (2, 3, 7)])
def test_it_is_torchs_product(rows, biased, taken):
    x, weight, bias = numbers(*rows, 576), numbers(200, 576, seed=1), numbers(200, seed=2) if biased else None
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    found = dense_product(x, weight, bias)
    assert taken["times"] == 1
    assert found.shape == exact.shape
    torch.testing.assert_close(found.double(), exact, atol=2e-4, rtol=1e-5)


@pytest.mark.parametrize(
    "x",
    [
        numbers(40, 64).T,
        numbers(64, 80)[:, ::2],
        numbers(3, 40, 7).transpose(1, 2),
        numbers(1, 1, 40).expand(2, 9, 40),
        numbers(70, 40)[3:],
        numbers(20, 40).flip(0),
    ],
)
def test_rows_may_lie_anyhow(x, taken):
    weight, bias = numbers(24, 40, seed=1), numbers(24, seed=2)
    torch.testing.assert_close(dense_product(x, weight, bias), F.linear(x, weight, bias))
    assert taken["times"] == 1


@pytest.mark.parametrize(
    ("weight", "bias"),
    [
        (numbers(24, 80)[:, ::2], None),
        (numbers(1, 40).expand(24, 40), None),
        (numbers(24, 40), numbers(48)[::2]),
        (numbers(24, 40), numbers(1).expand(24)),
        (numbers(24, 40).double(), None),
        (numbers(24, 40).to_mkldnn(), None),
    ],
)
def test_what_oneDNN_would_misread_is_left_to_torch(weight, bias, taken):
    x = numbers(2, 33, 40)
    assert not takes_dense(x, weight, bias)
    if weight.dtype == x.dtype and weight.layout == torch.strided:
        torch.testing.assert_close(dense_product(x, weight, bias), F.linear(x, weight, bias))
    assert not taken["times"]


def test_a_bias_of_another_size_is_refused_as_torch_does():
    with pytest.raises(RuntimeError):
        dense_product(numbers(9, 40), numbers(24, 40), numbers(23))
    with pytest.raises(RuntimeError):
        dense_product(numbers(9, 41), numbers(24, 40))


def test_gradients_reach_the_rows(taken):
    x, weight, bias = numbers(2, 33, 40).requires_grad_(), numbers(24, 40, seed=1), numbers(24, seed=2)
    for loss in (lambda y: y.sum(), lambda y: (y * y).sum(), lambda y: y[:, ::2].exp().mean()):
        (found,) = torch.autograd.grad(loss(dense_product(x, weight, bias)), x)
        (expected,) = torch.autograd.grad(loss(F.linear(x, weight, bias)), x)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)
    assert taken["times"] == 6


def test_gradients_of_gradients():
    x, weight = (numbers(9, 8) / 4).requires_grad_(), numbers(5, 8, seed=1) / 4

    def twice(product_of):
        (first,) = torch.autograd.grad((product_of(x, weight) ** 3).sum(), x, create_graph=True)
        return torch.autograd.grad((first**2).sum(), x)[0]

    torch.testing.assert_close(twice(dense_product), twice(F.linear), atol=1e-4, rtol=1e-4)


def test_trained_weights_get_their_gradients(taken):
    weight = numbers(24, 40).requires_grad_()
    dense_product(numbers(9, 40), weight).sum().backward()
    assert weight.grad is not None
    assert not taken["times"]
    with torch.no_grad():
        dense_product(numbers(9, 40), weight)
    assert taken["times"] == 1


def test_transforms_and_traces_get_torchs_product(taken):
    x, weight = numbers(3, 9, 40), numbers(24, 40)
    torch.testing.assert_close(torch.vmap(lambda row: dense_product(row, weight))(x), F.linear(x, weight))
    with torch.autocast("cpu", torch.bfloat16):
        assert dense_product(x, weight).dtype == torch.bfloat16
    assert dense_product(x.to("meta"), weight.to("meta")).is_meta
    assert not taken["times"]


def test_it_can_be_turned_off(monkeypatch):
    monkeypatch.setenv("ATTNGAP_NATIVE", "0")
    assert not product.available.__wrapped__()


def test_intels_processors_keep_what_was_written_for_them(monkeypatch, taken):
    monkeypatch.setattr(product, "maker", lambda: INTEL)
    x, weight = numbers(9, 40), numbers(24, 40, seed=1)
    assert torch.equal(dense_product(x, weight), F.linear(x, weight))
    assert not taken["times"]
