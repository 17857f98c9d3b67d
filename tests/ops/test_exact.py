"""Compiled softmax of some heads over their cache, against torch's attention with an explicit mask."""

import pytest
import torch
from torch.nn import functional as F

from attngap.errors import AttngapError
from attngap.ops import native
from attngap.ops.softmax.compiled import attend_into, can_attend

pytestmark = pytest.mark.skipif(not native.available(), reason="numba is not installed")

B, H, GROUPS = 2, 5, 2
PLACE = torch.tensor([1, -1, 0, 1, -1])


def tensors(t, n, d=24, dv=20, dtype=torch.float64):
    generator = torch.Generator().manual_seed(t + n)
    sizes = ((B, H, t, d), (B, GROUPS, n, d), (B, GROUPS, n, dv))
    return [torch.randn(size, generator=generator, dtype=dtype) for size in sizes]


def by_torch(q, keys, values, allowed=None, scale=None):
    heads = PLACE >= 0
    t, n = q.shape[2], keys.shape[2]
    mask = torch.ones(t, n, dtype=torch.bool).tril(n - t).expand(B, 1, t, n)
    if allowed is not None:
        mask = mask & allowed[:, None, None]
    keys, values = (x[:, PLACE[heads]] for x in (keys, values))
    return F.scaled_dot_product_attention(q[:, heads], keys, values, attn_mask=mask, scale=scale)


@pytest.mark.parametrize(("t", "n"), [(1, 1), (2, 2), (63, 63), (130, 130), (5, 200), (70, 333)])
def test_rows_read_all_keys_up_to_their_own(t, n):
    q, keys, values = tensors(t, n)
    out = torch.full((B, H, t, values.shape[3]), 7.0, dtype=q.dtype)
    attend_into(out, q, keys, values, PLACE)
    torch.testing.assert_close(out[:, PLACE >= 0], by_torch(q, keys, values), rtol=1e-9, atol=1e-9)
    assert (out[:, PLACE < 0] == 7).all()  # the others are not touched


@pytest.mark.parametrize(("d", "dv"), [(64, 64), (16, 40), (7, 3)])
def test_single_precision_and_other_widths(d, dv):
    q, keys, values = tensors(90, 150, d, dv, torch.float32)
    out = torch.empty(B, 90, H, dv).transpose(1, 2)
    attend_into(out, 3 * q, keys, values, PLACE, scale=0.5)
    want = by_torch(*(x.double() for x in (3 * q, keys, values)), scale=0.5)
    torch.testing.assert_close(out[:, PLACE >= 0].double(), want, rtol=2e-5, atol=2e-5)


def test_keys_that_may_not_be_read_are_not():
    q, keys, values = tensors(40, 100)
    allowed = torch.rand(B, 100, generator=torch.Generator().manual_seed(3)) > 0.4
    allowed[0, :70] = False
    out = torch.empty(B, H, 40, values.shape[3], dtype=q.dtype)
    attend_into(out, q, keys, values, PLACE, allowed=allowed)
    want = by_torch(q, keys, values, allowed)
    empty = ~(torch.ones(40, 100, dtype=torch.bool).tril(60) & allowed[:, None]).any(-1)  # (b, t)
    assert empty.any()
    got = out[:, PLACE >= 0]
    torch.testing.assert_close(got.transpose(1, 2)[~empty], want.transpose(1, 2)[~empty], rtol=1e-9, atol=1e-9)
    assert not got.transpose(1, 2)[empty].any()


def test_a_cache_with_room_behind_its_keys_and_large_logits():
    q, keys, values = tensors(20, 60)
    room = [torch.full((B, GROUPS, 90, x.shape[3]), torch.nan, dtype=x.dtype) for x in (keys, values)]
    for held, x in zip(room, (keys, values), strict=True):
        held[:, :, :60] = x
    out = torch.empty(B, H, 20, values.shape[3], dtype=q.dtype)
    held_keys, held_values = (held[:, :, :60] for held in room)
    attend_into(out, 300 * q, held_keys, held_values, PLACE)
    torch.testing.assert_close(out[:, PLACE >= 0], by_torch(300 * q, keys, values), rtol=1e-9, atol=1e-9)


def test_what_does_not_fit_is_refused():
    q, keys, values = tensors(4, 9)
    out = torch.empty(B, H, 4, values.shape[3], dtype=q.dtype)
    with pytest.raises(AttngapError, match=r"out must be \(2, 5, 4, 20\) for these rows and keys, got \(2, 5, 3, 20\)"):
        attend_into(out[:, :, 1:], q, keys, values, PLACE)
    with pytest.raises(AttngapError, match="place must be int64 below the 1 groups of keys"):
        attend_into(out, q, keys[:, :1], values[:, :1], PLACE)
    with pytest.raises(AttngapError, match=r"allowed must be \(2, 9\)"):
        attend_into(out, q, keys, values, PLACE, allowed=torch.ones(2, 8, dtype=torch.bool))
    assert can_attend(q, keys, values, out)
    assert not can_attend(q.bfloat16(), keys, values, out)
    with native.off():
        assert not can_attend(q, keys, values, out)
