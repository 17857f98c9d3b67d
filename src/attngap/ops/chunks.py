"""How a sequence is cut, and the buffers its pieces are computed in."""

import torch
from torch import Tensor


def chunk_sizes(t: int, chunk: int, *, halving: bool = False) -> list[int]:
    """Full chunks and the rest; with `halving` the rest is cut into powers of two, for code that splits in halves."""
    sizes = [chunk] * (t // chunk)
    rest = t % chunk
    if not halving:
        return sizes + [rest] * (rest > 0)
    return sizes + [bit for bit in (1 << n for n in reversed(range(rest.bit_length()))) if rest & bit]


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
