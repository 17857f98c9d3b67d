"""Which head a query head reads, and which row reads which key; shared by the definitions of the ops.

Layout `(b, h, t, d)`. k and v may have fewer heads than q (grouped queries): query head i reads key head
i // (h / h_kv). `mask` is `(b, t)`, True at real tokens: a False token is never attended to, leaves the state as it is,
and does not count as a position for windows and sinks. Outputs at False positions are zero.
"""

import torch
from torch import Tensor


def expand_heads(x: Tensor, heads: int) -> Tensor:
    """(b, h_kv, t, ...) -> (b, heads, t, ...), each key head repeated for its group of queries."""
    return x.repeat_interleave(heads // x.shape[1], dim=1)


def pair_mask(t: int, mask: Tensor | None, *, causal: bool, window: int | None, sinks: int) -> Tensor:
    """(b or 1, t, t) bool: may row i read key j? Window counts the row itself; sinks are the first real tokens."""
    index = torch.arange(t, device=None if mask is None else mask.device)
    real = torch.ones(1, t, dtype=torch.bool, device=index.device) if mask is None else mask.bool()
    place = real.long().cumsum(1) - 1  # (b, t) position among real tokens
    distance = place[:, :, None] - place[:, None, :]  # (b, t, t)
    allowed = real[:, None, :] & real[:, :, None]
    if causal:
        allowed = allowed & (index[:, None] >= index[None, :])
    if window is not None:
        near = distance.abs() < window if not causal else distance < window
        allowed = allowed & (near | (place[:, None, :] < sinks))
    return allowed
