"""The rule for vanishing normalizers: one closer to zero than EPS is replaced by EPS with its sign (of 0: +)."""

import torch
from torch import Tensor

EPS = 1e-6


def safe_normalizer(n: Tensor) -> Tensor:
    """Differentiable; the gradient is zero where a normalizer was replaced."""
    return torch.copysign(n.abs().clamp_min(EPS), n + 0.0)  # the sum turns -0 into +0
