import math

import pytest
import torch

from attngap.errors import AttngapError
from attngap.theory.datasets import attention, tokens


def test_tokens_are_the_construction():
    a = tokens(12, 5, 0.7, 0.4, row=4) / math.log(12) ** 0.5
    assert a[:, 0].nonzero().tolist() == [[4]]
    assert torch.allclose(a[:, 1:4], 0.4 * torch.eye(3, dtype=torch.float64).repeat(4, 1))
    assert torch.allclose(a[:, 4], torch.full((12,), 0.6, dtype=torch.float64))
    assert torch.allclose(a.sum(1), 1 + 0.7 * (torch.arange(12) == 4).double())


def test_attention_rows_sum_to_one_for_every_kernel():
    a = tokens(12, 5, 0.7, 0.4, row=4)
    for kernel in ("softmax", "linear", ("polynomial", 3), ("tilted", 2.0)):
        weights = attention(kernel, a, a, 1.0, 0.6)
        assert torch.allclose(weights.sum(-1), torch.ones(12, dtype=torch.float64))
    assert attention(("tilted", 2.0), a, a, 1.0, 0.6)[0, 4].item() == pytest.approx((0.7 + 2 / 12) / (0.7 + 2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((10, 5, 0.7, 0.4, 0), "n must be a multiple of d - 2 = 3, got 10"),
        ((12, 5, 0.7, 0.4, 12), "the needle's row must be 0 to 11, got 12"),
        ((12, 5, 0.7, 0.4, 0, 0.5), "b \\+ c must be 1"),
        ((3 * 2**14, 5, 0.7, 0.4, 0), "explicit tokens go up to n = 16384, got 49152"),
    ],
)
def test_bad_tokens(arguments, message):
    with pytest.raises(AttngapError, match=message):
        tokens(*arguments)
