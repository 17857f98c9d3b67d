"""A long tensor as chunks: read in the accumulating type, heads folded, padding zeroed; written back alike."""

import torch
from torch import Tensor


def chunk_sizes(t: int, chunk: int, *, halving: bool = False) -> list[int]:
    """Full chunks and the rest; with `halving` the rest is cut into powers of two, for code that splits in halves."""
    sizes = [chunk] * (t // chunk)
    rest = t % chunk
    if not halving:
        return sizes + [rest] * (rest > 0)
    return sizes + [bit for bit in (1 << n for n in reversed(range(rest.bit_length()))) if rest & bit]


class Chunked:
    """x (b, h, t, w) seen as chunks (b * heads, rows, w), without a copy where the layout allows it.

    With more heads than `heads` (grouped queries) the rows of a group follow each other: (group, chunk) rows, so that
    one product with the keys serves the group. With fewer, each chunk is repeated as it is read, and summed as it is
    written. Rows where `mask` is False read as zero and are written as zero, whatever they hold.
    """

    def __init__(self, x: Tensor, heads: int, sizes: list[int], dtype: torch.dtype, mask: Tensor | None = None):
        b, h, t, w = x.shape
        self.repeat = max(1, heads // h)
        self.shape, self.dtype = (b * heads, -1, w), dtype
        self.hidden = None if mask is None else [~m[:, None, None, :, None] for m in mask.split(sizes, 1)]
        plain = h == heads and x.dtype == dtype and mask is None
        flat = _flattened(x) if plain else None
        self.direct = flat is not None
        if flat is not None:
            self.pieces = flat.split(sizes, 1)  # (b * heads, chunk, w)
        elif h < heads:
            self.pieces = x.unsqueeze(2).expand(b, h, self.repeat, t, w).split(sizes, 3)
        else:
            self.pieces = x.unflatten(1, (heads, h // heads)).split(sizes, 3)  # (b, heads, group, chunk, w)

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, i: int) -> Tensor:
        piece = self.pieces[i]
        if self.direct:
            return piece
        if self.hidden is not None:
            piece = piece.masked_fill(self.hidden[i], 0.0)
        return piece.reshape(self.shape).to(self.dtype)

    def write(self, i: int, value: Tensor) -> None:
        if not self.direct or value.data_ptr() != self.pieces[i].data_ptr():
            place, value = self._place(i, value)
            place.copy_(value)

    def add(self, i: int, value: Tensor) -> None:
        place, value = self._place(i, value)
        place.add_(value)

    def target(self, i: int, scratch: "Scratch", name: str) -> Tensor:
        """Where to compute chunk i before `write`: in place if the layout allows it, else a buffer."""
        piece = self.pieces[i]
        rows = piece.shape[-2] if self.repeat > 1 else piece[0, 0, ..., 0].numel()
        return piece if self.direct else scratch(name, self.shape[0], rows, self.shape[2])

    def _place(self, i: int, value: Tensor) -> tuple[Tensor, Tensor]:
        """Where chunk i lives, and the value in that layout."""
        piece = self.pieces[i]
        if self.direct:
            return piece, value
        value = value.view(piece.shape)
        if self.hidden is not None:
            value = value.masked_fill(self.hidden[i], 0.0)
        return (piece[:, :, 0], value.sum(2)) if self.repeat > 1 else (piece, value)


class Scratch:
    """Buffers by name and shape, made once and used again by every chunk: a fresh one would cost page faults."""

    def __init__(self, like: Tensor, dtype: torch.dtype):
        self.like, self.dtype = like, dtype
        self.buffers: dict[tuple, Tensor] = {}

    def __call__(self, name: str, *shape: int) -> Tensor:
        key = (name, *shape)
        if key not in self.buffers:
            self.buffers[key] = self.like.new_empty(shape, dtype=self.dtype)
        return self.buffers[key]


def _flattened(x: Tensor) -> Tensor | None:
    """(b, h, t, w) -> (b * h, t, w) if that is a view."""
    b, h, t, w = x.shape
    try:
        return x.view(b * h, t, w)
    except RuntimeError:
        return None
