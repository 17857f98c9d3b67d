"""What is compared with what."""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from attngap import ops
from attngap.benchmark import peers

OURS = "attngap"
FORWARD, BOTH, EXPANDED = "forward", "forward+backward", "forward+backward, expanded gradient"
LONGEST = {  # beyond, they take minutes and say nothing new
    "sdpa": {FORWARD: 32768, BOTH: 8192, EXPANDED: 8192},
    "transformers": {FORWARD: 8192, BOTH: 8192},
}
Implementation = Callable[..., Tensor]


@dataclasses.dataclass(frozen=True)
class Case:
    """One op in one form: how its inputs are made, and who computes it. Ours is named OURS."""

    op: str
    form: str
    inputs: Callable[[int, int, int], tuple[Tensor, ...]]  # heads, length, width
    implementations: dict[str, Implementation]
    directions: tuple[str, ...] = (FORWARD, BOTH)


def cases(windows: tuple[int, ...] = (64, 256)) -> tuple[Case, ...]:
    return (
        Case(
            "linear",
            "normalized",
            _positive,
            {
                OURS: lambda q, k, v: ops.linear_attention(q, k, v)[0],
                "sdpa": peers.sdpa,
                "fast-transformers": peers.fast_transformers,
                "vectorized torch": peers.vectorized,
            },
            (FORWARD, BOTH, EXPANDED),
        ),
        Case(
            "delta",
            "gated",
            _gated,
            {
                OURS: lambda q, k, v, beta, log_decay: ops.delta_attention(q, k, v, beta, log_decay=log_decay)[0],
                "sdpa": lambda q, k, v, beta, log_decay: peers.sdpa(q, k, v),
                "transformers": peers.transformers_gated_delta,
            },
        ),
        *(_hybrid(window) for window in windows),
    )


def _hybrid(window: int) -> Case:
    def ours(q: Tensor, k: Tensor, v: Tensor, fq: Tensor, fk: Tensor) -> Tensor:
        return ops.hybrid_attention(q, k, v, fq, fk, window=window)[0]

    others = {"sdpa": lambda q, k, v, fq, fk: peers.sdpa(q, k, v)}
    return Case("hybrid", f"window {window}, 4 sinks", _with_features, {OURS: ours, **others})


def _positive(heads: int, t: int, width: int) -> tuple[Tensor, ...]:
    q, k = (torch.rand(1, heads, t, width) + 0.01 for _ in range(2))
    return q, k, torch.randn(1, heads, t, width)


def _gated(heads: int, t: int, width: int) -> tuple[Tensor, ...]:
    q, k, v = torch.randn(3, 1, heads, t, width)
    beta, log_decay = torch.rand(1, heads, t), -0.1 * torch.rand(1, heads, t)
    return F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, beta, log_decay


def _with_features(heads: int, t: int, width: int) -> tuple[Tensor, ...]:
    """Twice as many features as channels, as conversions have."""
    q, k, v = torch.randn(3, 1, heads, t, width)
    return q, k, v, torch.rand(1, heads, t, 2 * width), torch.rand(1, heads, t, 2 * width)
