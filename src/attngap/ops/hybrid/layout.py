"""Where the tokens of hybrid attention lie: the timeline, its blocks, and the staircases between near and far.

Keys that are no sinks lie on one timeline: first those kept from earlier pieces, then the new ones. A block of rows
reads one band of it, at most window + rows keys; in a band, with the row's own key at column lead + i,

    column c of row i is near   where 0 <= lead + i - c < window
                        far     where lead + i - c >= window: a staircase in the first `leaving` columns
                        future  elsewhere

and the tokens before the band are far for every row. The `leaving` columns are before the band of the next block.
Sinks are near for every row; the rows of the sinks themselves form the first block, with no timeline at all.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

Shape = tuple[int, int, int, int]  # rows, columns, lead, leaving
KEPT = 32  # staircases of each kind: a sequence has as many shapes as blocks fit into a window, and a few


@dataclasses.dataclass(frozen=True)
class Block:
    """Rows first:last of the piece, the band start:stop of the timeline; the first row's own key is at start + lead."""

    first: int
    last: int
    start: int
    stop: int
    lead: int
    leaving: int

    @property
    def end(self) -> int:
        """Where the leaving columns end on the timeline."""
        return self.start + self.leaving

    @property
    def shape(self) -> Shape:
        """All that its staircases depend on."""
        return self.last - self.first, self.stop - self.start, self.lead, self.leaving


@dataclasses.dataclass(frozen=True)
class Layout:
    """A piece of `length` tokens, the first `new_sinks` of them sinks, after `old_sinks` sinks and `kept` others."""

    old_sinks: int
    new_sinks: int
    kept: int
    length: int
    window: int
    chunk: int

    @property
    def sinks(self) -> int:
        return self.old_sinks + self.new_sinks

    @property
    def edges(self) -> tuple[int, int, int]:
        """All that the near staircase depends on beside a block's shape."""
        return self.old_sinks, self.sinks, self.window

    def blocks(self) -> list[Block]:
        found = [Block(0, self.new_sinks, 0, 0, 0, 0)] if self.new_sinks else []
        for first in range(self.new_sinks, self.length, self.chunk):
            last = min(first + self.chunk, self.length)
            own = first - self.new_sinks + self.kept
            start = max(0, own - self.window)
            stop = own + last - first
            found.append(Block(first, last, start, stop, own - start, max(0, stop - self.window - start)))
        return found


class Timeline:
    """Keys, values, features, or the gradients of one of them: `past` from earlier pieces, `new` from this one."""

    def __init__(self, layout: Layout, past: Tensor | None, new: Tensor | None, *, skip: int):
        self.layout, self.past, self.new = layout, past, new
        self.skip = skip  # how many sinks `past` begins with

    def _spans(self, start: int, stop: int, sinks: bool) -> Iterator[tuple[Tensor | None, int, int]]:
        layout = self.layout
        if sinks:
            yield self.past, 0, layout.old_sinks
            yield self.new, 0, layout.new_sinks
        yield self.past, self.skip + start, self.skip + min(stop, layout.kept)
        shift = layout.new_sinks - layout.kept
        yield self.new, max(start, layout.kept) + shift, stop + shift

    def read(self, start: int, stop: int, dtype: torch.dtype, *, sinks: bool = False) -> Tensor:
        """(b h_kv, columns, width): the sinks if asked for, then start:stop of the timeline."""
        spans = self._spans(start, stop, sinks)
        parts = [x[:, :, first:last] for x, first, last in spans if last > first and x is not None]
        whole = torch.cat(parts, 2) if len(parts) > 1 else parts[0]
        return whole.reshape(-1, *whole.shape[2:]).to(dtype)

    def add(self, grad: Tensor, start: int, stop: int, *, sinks: bool = False) -> None:
        """Add to what `read` reads."""
        at = 0
        for x, first, last in self._spans(start, stop, sinks):
            if last > first:
                if x is not None:
                    x[:, :, first:last] += grad[:, at : at + last - first].view(*x.shape[:2], last - first, x.shape[3])
                at += last - first

    @property
    def wanted(self) -> bool:
        return self.past is not None or self.new is not None


class Masks:
    """The staircases of a call's blocks."""

    def __init__(self, layout: Layout, group: int, like: Tensor):
        self.layout, self.group, self.like = layout, group, (like.dtype, like.device)

    def near(self, block: Block) -> Tensor:
        """(group rows, sinks + columns): 0 at near keys, -inf elsewhere."""
        return _near(block.shape, self.layout.edges, self.group, *self.like)

    def visible(self, block: Block) -> Tensor:
        """1 at near keys, 0 elsewhere."""
        return _visible(block.shape, self.layout.edges, self.group, *self.like)

    def far(self, block: Block) -> Tensor:
        """(group rows, leaving): 1 at far keys, 0 elsewhere."""
        return _far(block.shape, self.layout.window, self.group, *self.like)


def _kept(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Made once for a shape: every layer of a model asks for the same few."""
    return functools.lru_cache(KEPT)(torch.inference_mode(False)(make))


@_kept
def _near(shape: Shape, edges: tuple[int, int, int], group: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    rows, columns, lead, _ = shape
    old_sinks, sinks, window = edges
    if columns:
        away = _distance(rows, columns, lead, group, device)
        near = (away >= 0) & (away < window)
        near = torch.cat((near.new_ones(near.shape[0], sinks), near), 1)
    else:  # the rows of new sinks read the sinks up to themselves
        near = _distance(rows, sinks, old_sinks, group, device) >= 0
    return torch.zeros(near.shape, dtype=dtype, device=device).masked_fill_(~near, -torch.inf)


@_kept
def _visible(shape: Shape, edges: tuple[int, int, int], group: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return (_near(shape, edges, group, dtype, device) == 0).to(dtype)


@_kept
def _far(shape: Shape, window: int, group: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    rows, _, lead, leaving = shape
    return (_distance(rows, leaving, lead, group, device) >= window).to(dtype)


def _distance(rows: int, columns: int, lead: int, group: int, device: torch.device) -> Tensor:
    row = torch.arange(rows, device=device).repeat(group)[:, None]
    return lead + row - torch.arange(columns, device=device)


def rows(x: Tensor, block: Block, kv_heads: int, dtype: torch.dtype) -> Tensor:
    """(b, h, t, width) -> (b h_kv, group rows, width), the queries that share a key head one below the other."""
    return x[:, :, block.first : block.last].reshape(x.shape[0] * kv_heads, -1, x.shape[3]).to(dtype)


def row_scalars(x: Tensor, block: Block, kv_heads: int) -> Tensor:
    """(b, h, t) -> (b h_kv, group rows, 1)."""
    return x[:, :, block.first : block.last].reshape(x.shape[0] * kv_heads, -1, 1)


def put_rows(target: Tensor | None, block: Block, x: Tensor) -> None:
    """What `rows` or `row_scalars` would read; nothing where there is no target."""
    if target is not None:
        cut = target[:, :, block.first : block.last]
        cut.copy_(x.view(cut.shape))
