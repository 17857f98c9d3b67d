"""Sequences as groups of chunks: nothing left out, and views wherever they are promised."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attngap.ops.groups import ChunkView, Span, spans


@given(t=st.integers(1, 300), chunk=st.integers(1, 70), most=st.integers(1, 9), halving=st.booleans())
def test_groups_cover_the_sequence(t, chunk, most, halving):
    found = spans(t, chunk, most, halving=halving)
    assert [i for span in found for i in span.tokens] == list(range(t))
    assert max(span.count for span in found) <= most
    if halving:
        assert all(span.chunk & (span.chunk - 1) == 0 for span in found)


def folded(x: torch.Tensor, heads: int, mask: torch.Tensor | None = None) -> ChunkView:
    return ChunkView(x, heads, torch.float32, mask)


def by_hand(x: torch.Tensor, heads: int, span: Span) -> torch.Tensor:
    b, h, _, w = x.shape
    x = x[:, :, span.tokens.start : span.tokens.stop].repeat_interleave(max(1, heads // h), 1)
    cut = x.unflatten(2, (span.count, span.chunk)).unflatten(1, (heads, -1)).transpose(2, 3)
    return cut.reshape(b * heads * span.count, -1, w)  # (b, heads, count, group, chunk, w) before


@pytest.mark.parametrize("span", [Span(0, 4, 5), Span(4, 8, 2), Span(3, 1, 1)], ids=str)
@pytest.mark.parametrize("heads", [2, 4, 8])
def test_a_group_is_read_and_written_back(span, heads):
    x = torch.rand(3, 4, 20, 5)
    read = folded(x, heads).read(span)
    assert torch.equal(read, by_hand(x, heads, span))
    assert read.shape == folded(x, heads).shape(span)
    copy = torch.zeros_like(x)
    folded(copy, heads).write(span, read, factor=torch.full_like(read[..., :1], 0.5))
    expected = torch.zeros_like(x)
    repeats = max(1, heads // 4)  # summed as they are written
    expected[:, :, span.tokens.start : span.tokens.stop] = 0.5 * repeats * x[:, :, span.tokens.start : span.tokens.stop]
    torch.testing.assert_close(copy, expected)


@pytest.mark.parametrize("layout", [(0, 1, 2, 3), (0, 2, 1, 3), (3, 2, 1, 0)], ids=["b h t d", "b t h d", "d t h b"])
@pytest.mark.parametrize("lanes", [(slice(0, 1), slice(1, 2)), (slice(None), slice(None))], ids=["one", "all"])
@pytest.mark.parametrize("span", [Span(0, 4, 5), Span(4, 4, 3), Span(16, 4, 1)], ids=str)
def test_views_are_what_is_read(layout, lanes, span):
    x = torch.rand(3, 4, 20, 5).permute(layout).contiguous().permute(layout)[lanes]
    whole = folded(x, x.shape[1])
    view = whole.view(span)
    one_lane, whole_span = x.shape[:2] == (1, 1), span.length == 20
    if layout == (3, 2, 1, 0) or not (one_lane or span.count == 1 or whole_span):
        assert view is None
    elif one_lane or layout == (0, 1, 2, 3):
        assert view is not None
    if view is not None:
        assert torch.equal(view, whole.read(span))
        assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def test_no_view_where_rows_must_change():
    x, span = torch.rand(1, 2, 8, 4), Span(0, 4, 2)
    assert folded(x, 2).view(span) is not None
    assert folded(x, 2, torch.ones(1, 8, dtype=torch.bool)).view(span) is None
    assert folded(x, 1).view(span) is None
    assert folded(x, 4).view(span) is None
    assert folded(x.double(), 2).view(span) is None
    assert folded(x[..., :1].expand(x.shape), 2).view(span) is None
