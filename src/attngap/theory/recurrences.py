"""Small explicit linear attentions of every kind the state theorem covers, as weight matrices: material for checks."""

import math
from collections.abc import Callable

import torch
from torch import Tensor


def causal_softmax(n: int, spread: float, generator: torch.Generator) -> Tensor:
    """(n, n) causal softmax weights of Gaussian logits with that standard deviation."""
    logits = spread * torch.randn(n, n, generator=generator, dtype=torch.float64)
    return logits.masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), -math.inf).softmax(-1)


def recurrent_weights(
    n: int,
    r: int,
    generator: torch.Generator,
    *,
    gate: Callable[[Tensor, Tensor], Tensor] | None = None,
    positive: bool = False,
    rotary: bool = False,
) -> Tensor:
    """Run S_i = M_i S_{i-1} + k_i e_i^T, o_i = q_i^T S_i with values e_i, so that o is the weight matrix.

    `gate(k_i, noise)` returns M_i, r x r.
    """
    q, k, noise = (torch.randn(n, r, generator=generator, dtype=torch.float64) for _ in range(3))
    if positive:
        q, k = q.abs(), k.abs()
    if rotary:
        q, k = _rotated(q), _rotated(k)
    state = torch.zeros(r, n, dtype=torch.float64)
    rows = []
    for i in range(n):
        if gate is not None:
            state = gate(k[i], noise[i]) @ state
        state[:, i] += k[i]
        rows.append(q[i] @ state)
    return torch.stack(rows)


def _rotated(x: Tensor) -> Tensor:
    """Rotate the first two coordinates by the position, as rotary embeddings do."""
    angle = torch.arange(len(x), dtype=torch.float64) * 0.3
    turned = torch.stack(
        [angle.cos() * x[:, 0] - angle.sin() * x[:, 1], angle.sin() * x[:, 0] + angle.cos() * x[:, 1]], 1
    )
    return torch.cat([turned, x[:, 2:]], 1)


def _scalar(k: Tensor, noise: Tensor) -> Tensor:
    return noise[0].sigmoid() * torch.eye(len(k), dtype=k.dtype)


def _vector(k: Tensor, noise: Tensor) -> Tensor:
    return noise.sigmoid().diag()


def _matrix(k: Tensor, noise: Tensor) -> Tensor:
    return torch.outer(noise.sin(), noise.cos()) + 0.5 * torch.eye(len(k), dtype=k.dtype)


def _delta(k: Tensor, noise: Tensor) -> Tensor:
    unit = k / k.norm()
    return torch.eye(len(k), dtype=k.dtype) - noise[0].sigmoid() * torch.outer(unit, unit)


def _normalized(n: int, r: int, generator: torch.Generator) -> Tensor:
    weights = recurrent_weights(n, r, generator, positive=True)
    return weights / weights.sum(-1, keepdim=True)


def _cosine(n: int, r: int, generator: torch.Generator) -> Tensor:
    """Weights times cos(pi/2 (i - j) / n): a product of two features per feature."""
    place = torch.arange(n, dtype=torch.float64) * (math.pi / 2 / n)
    return recurrent_weights(n, r, generator) * (place[:, None] - place).cos()


def _offset(n: int, r: int, generator: torch.Generator) -> Tensor:
    """A constant added to every weight of a row (InLine, MALA)."""
    shift = torch.randn(n, 1, generator=generator, dtype=torch.float64)
    return recurrent_weights(n, r, generator) + shift.expand(n, n).tril()


def _convolved(n: int, r: int, generator: torch.Generator) -> Tensor:
    """A causal convolution of width 3 on the values: W times a banded matrix."""
    band = sum(torch.diag(torch.randn(n - lag, generator=generator, dtype=torch.float64), -lag) for lag in range(3))
    return recurrent_weights(n, r, generator) @ band


Make = Callable[[int, int, torch.Generator], Tensor]
# name: (the largest rank of a block as a function of the state's rank, how to make one)
RECURRENCES: dict[str, tuple[Callable[[int], int], Make]] = {
    "ungated": (lambda r: r, recurrent_weights),
    "scalar gate": (lambda r: r, lambda n, r, g: recurrent_weights(n, r, g, gate=_scalar)),
    "vector gate": (lambda r: r, lambda n, r, g: recurrent_weights(n, r, g, gate=_vector)),
    "matrix gate": (lambda r: r, lambda n, r, g: recurrent_weights(n, r, g, gate=_matrix)),
    "delta rule": (lambda r: r, lambda n, r, g: recurrent_weights(n, r, g, gate=_delta)),
    "normalized": (lambda r: r, _normalized),
    "rotary": (lambda r: r, lambda n, r, g: recurrent_weights(n, r, g, rotary=True)),
    "cosine": (lambda r: 2 * r, _cosine),
    "row offset": (lambda r: r + 1, _offset),
    "convolution of 3": (lambda r: r + 2, _convolved),
}
