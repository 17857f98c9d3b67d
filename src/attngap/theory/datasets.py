"""The construction as explicit tensors, for small n: tokens, n x n weights, read-outs. The law's witness."""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attngap.errors import AttngapError
from attngap.theory.kernels import Kernel, Number, check
from attngap.theory.separation import MARGIN, check_split

LARGEST_N = 16384  # an n x n matrix of doubles takes 2 GB here


def tokens(n: int, d: int, needle: Number, b: Number, row: int, c: Number | None = None) -> Float[Tensor, "n d"]:
    """The token matrix A: needle at `row` in the first column, stacked identities, a constant last column.

    >>> tokens(4, 4, 0.7, 0.5, row=1).div(math.log(4) ** 0.5)
    tensor([[0.0000, 0.5000, 0.0000, 0.5000],
            [0.7000, 0.0000, 0.5000, 0.5000],
            [0.0000, 0.5000, 0.0000, 0.5000],
            [0.0000, 0.0000, 0.5000, 0.5000]], dtype=torch.float64)
    """
    c = 1 - b if c is None else c
    check_split(b, c)
    if d < 3 or n % (d - 2):
        raise AttngapError(f"n must be a multiple of d - 2 = {d - 2}, got {n}")
    if not 0 <= row < n:
        raise AttngapError(f"the needle's row must be 0 to {n - 1}, got {row}")
    if n > LARGEST_N:
        raise AttngapError(f"explicit tokens go up to n = {LARGEST_N}, got {n}. The law itself takes any n")
    out = torch.zeros(n, d, dtype=torch.float64)
    out[row, 0] = needle
    out[:, 1:-1] = b * torch.eye(d - 2, dtype=torch.float64).repeat(n // (d - 2), 1)
    out[:, -1] = c
    return out * math.log(n) ** 0.5


def attention(
    kernel: Kernel, queries: Float[Tensor, "n d"], keys: Float[Tensor, "n d"], scale: Number, c: Number
) -> Float[Tensor, "n n"]:
    """Weights by the definition: scores = scale * Q X K^T with X of ones, the kernel, rows divided by their sums."""
    kernel = check(kernel)
    n, d = keys.shape
    mixing = torch.ones(d, d, dtype=torch.float64)
    if kernel[0] == "tilted":
        mixing = torch.zeros(d, d, dtype=torch.float64)
        mixing[:, 0], mixing[:, -1] = 1.0, float(kernel[1]) / (n * c)
    scores = scale * (queries @ mixing @ keys.mT)
    if kernel == "softmax":
        return scores.softmax(-1)
    if kernel[0] == "polynomial":
        scores = scores ** float(kernel[1])
    return scores / scores.sum(-1, keepdim=True)


def mixed(
    kernel: Kernel, n: int, d: int, needle: Number, b: Number, row: int, scale: Number = 1.0, aq: Number | None = None
) -> Float[Tensor, "n d"]:
    """Attention output on the tokens, before the read-outs: row i is sum_j f_ij A_j."""
    keys = tokens(n, d, needle, b, row)
    queries = keys if aq is None else tokens(n, d, aq, b, row)
    return attention(kernel, queries, keys, scale, 1 - b) @ keys


def fires(outputs: Float[Tensor, "n d"], signs: Float[Tensor, "d m"], b: Number) -> Bool[Tensor, " m"]:
    """Does any row clear the threshold (c + 0.1) sqrt(log n) on each read-out?"""
    tau = (1 - b + MARGIN) * math.log(len(outputs)) ** 0.5
    return (outputs @ signs > tau).any(0)


def outputs_sum(outputs: Float[Tensor, "n d"], signs: Float[Tensor, "d m"], b: Number) -> Float[Tensor, " m"]:
    """sum_i phi(z_i) for each read-out, in units of sqrt(log n); F is the sum over read-outs."""
    unit = math.log(len(outputs)) ** 0.5
    z = outputs @ signs / unit
    return torch.where(z > 1 - b + MARGIN, z, 0.0).sum(0)
