"""A sequence as groups of chunks: a group is read as one batch of chunks, and written back alike."""

import dataclasses
import itertools

import torch
from torch import Tensor

from attngap.ops.chunks import chunk_sizes

GROUP = 2**17  # floats of a buffer of a group: its products stay in cache, and calls are few


@dataclasses.dataclass(frozen=True)
class Span:
    """`count` chunks of `chunk` tokens from token `start` on."""

    start: int
    chunk: int
    count: int

    @property
    def length(self) -> int:
        return self.chunk * self.count

    @property
    def tokens(self) -> range:
        return range(self.start, self.start + self.length)


def spans(t: int, chunk: int, most: int, *, halving: bool) -> list[Span]:
    """All groups of a sequence, of at most `most` chunks; chunks of a group are equally long."""
    chunk = 1 << (chunk.bit_length() - 1) if halving else chunk
    found, start = [], 0
    for size, alike in itertools.groupby(chunk_sizes(t, chunk, halving=halving)):
        left = len(list(alike))
        while left:
            found.append(Span(start, size, min(left, most)))
            start, left = start + found[-1].length, left - found[-1].count
    return found


class ChunkView:
    """x (b, h, t, w) seen as (n, count, rows, w), n = b heads: (b, outer, repeat, count, group, chunk, w).

    With more heads than `heads` (grouped queries) the rows of a group follow each other, so that one product with the
    keys serves the group. With fewer, they are repeated as they are read, and summed as they are written. Rows where
    `mask` is False read as zero and are written as zero, whatever they hold.
    """

    def __init__(self, x: Tensor, heads: int, dtype: torch.dtype, mask: Tensor | None):
        self.x, self.dtype, self.mask = x, dtype, mask
        self.outer = min(x.shape[1], heads)
        self.repeat, self.group = heads // self.outer, x.shape[1] // self.outer

    def shape(self, span: Span) -> tuple[int, int, int]:
        """Of the group as one batch of chunks: (n count, rows, w)."""
        lanes = self.x.shape[0] * self.outer * self.repeat
        return lanes * span.count, self.group * span.chunk, self.x.shape[3]

    def view(self, span: Span) -> Tensor | None:
        """The batch of chunks in place, ready for batched products; None where only a copy can be."""
        x = self.x
        by_batch, by_head, by_token, by_channel = x.stride()
        if self.mask is not None or self.repeat * self.group > 1 or x.dtype != self.dtype:
            return None
        sizes, strides = (x.shape[0], self.outer, span.count), (by_batch, by_head, span.chunk * by_token)
        step = _merged(sizes, strides)
        if step is None or by_channel != 1 or by_token < x.shape[3]:
            return None
        size = (sizes[0] * sizes[1] * sizes[2], span.chunk, x.shape[3])
        return x.as_strided(size, (step, by_token, 1), x.storage_offset() + span.start * by_token)

    def read(self, span: Span, out: Tensor | None = None) -> Tensor:
        """Into `out`, a batch of chunks, or (n, count, rows, w) in any order; into fresh memory if None."""
        cut = self._cut(span, self.repeat)
        if out is None:
            out = cut.new_empty(self.shape(span), dtype=self.dtype)
        place = out.view(cut.shape)
        place.copy_(cut)
        if self.mask is not None:
            place.masked_fill_(self._hidden(self.mask, span), 0.0)
        return out

    def write(self, span: Span, value: Tensor, factor: Tensor | None = None) -> None:
        """The value, shaped as what is read, times a factor a row."""
        place = self._cut(span, 1)
        if factor is not None and self.mask is None and self.repeat == 1 and place.dtype == value.dtype:
            # One pass where two would read and write the value again.
            torch.mul(value.reshape(place.shape), factor.reshape(*place.shape[:6], 1), out=place)
        else:
            place.copy_(self._laid_out(span, place, value if factor is None else value * factor))

    def _laid_out(self, span: Span, place: Tensor, value: Tensor) -> Tensor:
        value = value.reshape(*place.shape[:2], self.repeat, *place.shape[3:])
        if self.repeat > 1:
            value = value.sum(2, keepdim=True)
        return value if self.mask is None else value.masked_fill(self._hidden(self.mask, span), 0.0)

    def _cut(self, span: Span, repeat: int) -> Tensor:
        """(b, outer, repeat, count, group, chunk, w), a view."""
        x, (by_batch, by_head, by_token, by_channel) = self.x, self.x.stride()
        size = (x.shape[0], self.outer, repeat, span.count, self.group, span.chunk, x.shape[3])
        stride = (by_batch, self.group * by_head, 0, span.chunk * by_token, by_head, by_token, by_channel)
        # One call where slicing, unflattening and permuting are four, once a group and tensor.
        return x.as_strided(size, stride, x.storage_offset() + span.start * by_token)

    def _hidden(self, mask: Tensor, span: Span) -> Tensor:
        cut = ~mask[:, span.start : span.start + span.length].unflatten(1, (span.count, span.chunk))
        return cut[:, None, None, :, None, :, None]


def _merged(sizes: tuple[int, ...], strides: tuple[int, ...]) -> int | None:
    """The stride of the axes taken as one, None if they cannot be."""
    kept = [(size, stride) for size, stride in zip(sizes, strides, strict=True) if size > 1]
    if any(outer != size * inner for (_, outer), (size, inner) in itertools.pairwise(kept)):
        return None
    return kept[-1][1] if kept else strides[-1]
