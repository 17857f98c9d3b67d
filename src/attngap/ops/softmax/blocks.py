"""Softmax attention over a window and sinks, a block of rows against a tile of keys at a time: never n x n.

Rows keep a running maximum and sum over the tiles (Milakov and Gimelshein, arXiv 1805.02867); the backward recomputes
the weights tile by tile (Dao et al., arXiv 2205.14135). Memory beyond inputs and outputs does not grow with the
sequence, except that gradients of 16-bit keys and values are summed in a float32 copy.
"""

import dataclasses

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attngap.ops.exponent import weight_exp_
from attngap.ops.groups import ChunkView, Span

ROWS, TILE = 128, 1024


@dataclasses.dataclass(frozen=True)
class Reach:
    """Which keys a row may read."""

    t: int
    causal: bool
    window: int | None
    sinks: int

    def tiles(self, rows: range) -> list[tuple[int, int]]:
        """The tiles of keys that some of the rows may read; in the first of them every row may read a key."""
        low, high = 0, rows.stop if self.causal else self.t
        if self.window is not None:
            low, high = max(0, rows.start - self.window + 1), min(high, rows.stop + self.window - 1)
            if not self.causal:
                high = max(high, min(self.sinks, self.t))
        near = [(first, min(first + TILE, high)) for first in range(low, high, TILE)]
        return [(0, min(self.sinks, low)), *near] if self.sinks and low else near

    def hidden(self, rows: range, first: int, stop: int, device: torch.device) -> Tensor | None:
        """(rows, keys) True where a row may not read a key; None if each may read every key."""
        too_late = self.causal and stop - 1 > rows[0]
        far = max(rows[-1] - first, 0 if self.causal else stop - 1 - rows[0])
        too_far = self.window is not None and far >= self.window and stop > self.sinks
        if not (too_late or too_far):
            return None
        i = torch.arange(rows.start, rows.stop, device=device)[:, None]
        j = torch.arange(first, stop, device=device)[None]
        distance = i - j if self.causal else (i - j).abs()
        hidden = distance < 0
        if self.window is not None:
            hidden |= (distance >= self.window) & (j >= self.sinks)
        return hidden


class SoftmaxBlocks(torch.autograd.Function):
    """(q, k, v, scale, reach, dtype to compute in) -> out."""

    @staticmethod
    def forward(ctx, q, k, v, scale: float, reach: Reach, dtype: torch.dtype):
        out = torch.empty(*q.shape[:3], v.shape[-1], dtype=v.dtype, device=v.device)
        run = _Tiles(q, k, reach, dtype)
        queries, places = run.folded(q), run.folded(out)
        for block in run.blocks:
            rows, query = block.tokens, queries.read(block) * scale
            total = mixed = torch.zeros((), dtype=dtype, device=q.device)
            top = torch.full_like(query[..., :1], -torch.inf)
            for tile in reach.tiles(rows):
                logits, hidden = run.logits(query, rows, tile)
                new = torch.maximum(top, logits.amax(-1, keepdim=True))
                weights, shrink = run.weights(logits, new, hidden), weight_exp_(top - new)
                total = total * shrink + weights.sum(-1, keepdim=True)
                mixed = mixed * shrink + weights @ run.tile(v, tile)
                top = new
            places.write(block, mixed / total)
        ctx.save_for_backward(q, k, v, out)
        ctx.options = scale, reach, dtype
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):
        q, k, v, out = ctx.saved_tensors
        scale, reach, dtype = ctx.options
        run = _Tiles(q, k, reach, dtype)
        dq = torch.empty_like(q, memory_format=torch.contiguous_format)
        dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (k, v))
        queries, dq_rows, d_rows, out_rows = (run.folded(x) for x in (q, dq, d_out, out))
        for block in run.blocks:
            rows, query, above = block.tokens, queries.read(block) * scale, d_rows.read(block)
            log_total = run.log_total(query, rows)
            mean = (above * out_rows.read(block)).sum(-1, keepdim=True)  # of d weights, under the weights
            d_query = torch.zeros_like(query)
            for tile in reach.tiles(rows):
                logits, hidden = run.logits(query, rows, tile)
                weights = run.weights(logits, log_total, hidden)
                d_logits = (above @ run.tile(v, tile).mT).sub_(mean).mul_(weights)
                d_query.baddbmm_(d_logits, run.tile(k, tile))
                run.add(dk, tile, d_logits.mT @ query)
                run.add(dv, tile, weights.mT @ above)
            dq_rows.write(block, d_query.mul_(scale))
        return dq, dk.to(k.dtype), dv.to(v.dtype), None, None, None


class _Tiles:
    """Rows of queries (n, group * rows, d) and tiles of keys (n, tile, d), n = b * h_kv: a group shares its tile."""

    def __init__(self, q: Tensor, k: Tensor, reach: Reach, dtype: torch.dtype):
        self.k, self.reach, self.dtype = k, reach, dtype
        t = q.shape[2]
        self.blocks = [Span(start, min(ROWS, t - start), 1) for start in range(0, t, ROWS)]

    def folded(self, x: Tensor) -> ChunkView:
        return ChunkView(x, self.k.shape[1], self.dtype, None)

    def tile(self, x: Tensor, tile: tuple[int, int]) -> Tensor:
        return x[:, :, slice(*tile)].flatten(0, 1).to(self.dtype)

    def add(self, total: Tensor, tile: tuple[int, int], part: Tensor) -> None:
        total[:, :, slice(*tile)] += part.view(*total.shape[:2], -1, total.shape[-1])

    def logits(self, query: Tensor, rows: range, tile: tuple[int, int]) -> tuple[Tensor, Tensor | None]:
        """And which of them are hidden: these are -inf."""
        logits = query @ self.tile(self.k, tile).mT
        hidden = self.reach.hidden(rows, *tile, device=query.device)
        return _fill(logits, hidden, -torch.inf), hidden

    def weights(self, logits: Tensor, unit: Tensor, hidden: Tensor | None) -> Tensor:
        """exp(logits - unit) in place, exactly 0 where hidden."""
        return _fill(weight_exp_(logits.sub_(unit)), hidden, 0.0)

    def log_total(self, query: Tensor, rows: range) -> Tensor:
        parts = [self.logits(query, rows, tile)[0].logsumexp(-1, keepdim=True) for tile in self.reach.tiles(rows)]
        return torch.cat(parts, -1).logsumexp(-1, keepdim=True)


def _fill(x: Tensor, hidden: Tensor | None, value: float) -> Tensor:
    """x (n, group * rows, keys), filled where `hidden` (rows, keys)."""
    if hidden is not None:
        x.unflatten(1, (-1, hidden.shape[0])).masked_fill_(hidden, value)
    return x
