import pytest
import torch

from attngap.errors import AttngapError
from attngap.models.masks import readable


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("low", ["min", -torch.inf, -10000.0])
def test_additive_masks_say_what_boolean_ones_do(dtype, low):
    said = torch.tensor([[True, False], [True, True]])
    forbidden = torch.finfo(dtype).min if low == "min" else low
    added = torch.zeros(2, 2, dtype=dtype).masked_fill(~said, forbidden)
    assert torch.equal(readable(added), said)
    assert readable(said) is said


@pytest.mark.parametrize("number", [-0.5, 2.0, -20.0])
def test_a_bias_is_not_taken_for_a_mask(number):
    with pytest.raises(AttngapError, match="numbers other than zero where keys may be read"):
        readable(torch.tensor([[0.0, number]]))
