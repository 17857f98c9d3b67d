import pytest
import torch

from attngap import ops


@pytest.mark.parametrize("name", ["softmax", "linear", "delta", "hybrid"])
def test_autocast_changes_nothing(name):
    torch.manual_seed(0)
    q, k, v = torch.rand(3, 1, 2, 40, 8)
    calls = {
        "softmax": lambda: ops.softmax_attention(q, k, v, window=8),
        "linear": lambda: ops.linear_attention(q, k, v)[0],
        "delta": lambda: ops.delta_attention(q, k, v, torch.rand_like(q[..., 0]).fill_(0.5))[0],
        "hybrid": lambda: ops.hybrid_attention(q, k, v, q, k, window=8)[0],
    }
    alone = calls[name]()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(calls[name](), alone)
