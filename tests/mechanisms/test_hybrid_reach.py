"""Features are read up to the position they were fitted to."""

import pytest
import torch

from attngap import mechanism
from attngap.errors import AttngapError

OPTIONS = {"window": 6, "sinks": 2, "relative": False, "kv_heads": 2}


def made(**options):
    torch.manual_seed(0)
    return mechanism("hybrid", 4, 8, **OPTIONS, **options)


@pytest.mark.parametrize("split", [0, 15, 24])
def test_beyond_its_reach_a_query_reads_the_near_keys_alone(split):
    """Whole and in two parts, the second beginning before or beyond the reach; against mechanisms that have none."""
    q = torch.randn(2, 4, 40, 8)
    k, v = torch.randn(2, 2, 2, 40, 8)
    near = mechanism("hybrid", 4, 8, feature_map="none", gain="none", **OPTIONS)(None, q, k, v)[0]
    every, bounded = made(), made(reach=20)
    expected = torch.cat((every(None, q, k, v)[0][:, :, :20], near[:, :, 20:]), 2)
    first, state = (
        bounded.chunked(bounded.read(None, *(x[:, :, :split] for x in (q, k, v)))) if split else (q[:, :, :0], None)
    )
    rest = bounded.read(None, *(x[:, :, split:] for x in (q, k, v)), start=split)
    out = torch.cat((first, bounded.chunked(rest, state)[0]), 2)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)


def test_steps_agree():
    q = torch.randn(1, 4, 30, 8)
    k, v = torch.randn(2, 1, 2, 30, 8)
    m = made(reach=12)
    whole = m(None, q, k, v)[0]
    state, rows = m.init_state(m.read(None, q[:, :, :1], k[:, :, :1], v[:, :, :1])), []
    for i in range(30):
        token = m.read(None, *(x[:, :, i : i + 1] for x in (q, k, v)), start=i)
        row, state = m.step(state, token)
        rows.append(row)
    torch.testing.assert_close(torch.cat(rows, 2), whole, atol=1e-5, rtol=1e-4)


def test_a_reach_of_nothing_is_refused():
    with pytest.raises(AttngapError, match="hybrid: reach"):
        made(reach=0)
