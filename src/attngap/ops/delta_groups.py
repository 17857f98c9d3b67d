"""A sequence as groups of chunks: read folded into one batch of chunks, written back alike."""

import dataclasses

import torch
from torch import Tensor

from attngap.ops.chunks import chunk_sizes

GROUP = 2**17  # floats of k a group holds: its products stay in cache, and calls are few


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


def spans(t: int, chunk: int, width: int, *, halving: bool) -> list[Span]:
    """All groups of a sequence whose tokens are `width` floats; chunks of a group are equally long."""
    chunk = 1 << (chunk.bit_length() - 1) if halving else chunk
    most = max(1, GROUP // (chunk * width))
    found, start = [], 0
    for size in chunk_sizes(t, chunk, halving=halving):
        last = found[-1] if found else None
        if last is not None and last.chunk == size and last.count < most:
            found[-1] = dataclasses.replace(last, count=last.count + 1)
        else:
            found.append(Span(start, size, 1))
        start += size
    return found


class Folded:
    """x (b, h, t, w) seen as (count b heads, rows, w), chunk by chunk: (count, b, heads, group, chunk, w).

    With more heads than `heads` (grouped queries) the rows of a group follow each other, so that one product with the
    keys serves the group. With fewer, they are repeated as they are read, and summed as they are written. Rows where
    `mask` is False read as zero and are written as zero, whatever they hold.
    """

    def __init__(self, x: Tensor, heads: int, dtype: torch.dtype, mask: Tensor | None):
        self.x, self.dtype, self.mask = x, dtype, mask
        self.outer = min(x.shape[1], heads)
        self.repeat, self.group = heads // self.outer, x.shape[1] // self.outer

    def rows(self, span: Span) -> int:
        return self.group * span.chunk

    def read(self, span: Span, out: Tensor | None = None) -> Tensor:
        """Into `out` (count b heads, rows, w), which may be strided; into fresh memory if None."""
        cut = self._cut(span)
        if out is None:
            n = span.count * cut.shape[1] * self.outer * self.repeat
            out = cut.new_empty((n, self.rows(span), cut.shape[5]), dtype=self.dtype)
        place = out.view(*cut.shape[:3], self.repeat * self.group, *cut.shape[4:])
        place.copy_(cut)
        if self.mask is not None:
            place.masked_fill_(self._hidden(self.mask, span), 0.0)
        return out

    def write(self, span: Span, value: Tensor, factor: Tensor | None = None) -> None:
        """The value, times a factor a row."""
        place = self._cut(span)
        if factor is None:
            place.copy_(self._laid_out(span, place, value))
        elif self.mask is None and self.repeat == 1 and place.dtype == value.dtype:
            # One pass where two would read and write the value again.
            torch.mul(value.view(place.shape), factor.view(*place.shape[:5], 1), out=place)
        else:
            place.copy_(self._laid_out(span, place, value * factor))

    def add(self, span: Span, value: Tensor) -> None:
        place = self._cut(span)
        place.add_(self._laid_out(span, place, value))

    def _laid_out(self, span: Span, place: Tensor, value: Tensor) -> Tensor:
        if self.repeat > 1:
            value = value.reshape(*place.shape[:3], self.repeat, *place.shape[4:]).sum(3, keepdim=True)
        else:
            value = value.reshape(place.shape)
        return value if self.mask is None else value.masked_fill(self._hidden(self.mask, span), 0.0)

    def _cut(self, span: Span) -> Tensor:
        """(count, b, outer, group, chunk, w), a view."""
        x, (by_batch, by_head, by_token, by_channel) = self.x, self.x.stride()
        size = (span.count, x.shape[0], self.outer, self.group, span.chunk, x.shape[3])
        stride = (span.chunk * by_token, by_batch, self.group * by_head, by_head, by_token, by_channel)
        # One call where slicing, unflattening and permuting are four, once a group and tensor.
        return x.as_strided(size, stride, x.storage_offset() + span.start * by_token)

    def _hidden(self, mask: Tensor, span: Span) -> Tensor:
        cut = ~mask[:, span.start : span.start + span.length].unflatten(1, (span.count, span.chunk))
        return cut.transpose(0, 1)[:, :, None, None, :, None]
