"""exp of log-weights, kept off the paths on which math libraries and processors are slow."""

import math

import torch
from torch import Tensor

# A weight this small beside one near 1 is nothing: four times as many digits down as the type carries. Further down exp
# is thirty to a hundred times slower (it leaves the normal numbers at -87 in float32), and so are products with it.
LEAST = {dtype: 4 * math.log(torch.finfo(dtype).eps) for dtype in (torch.float32, torch.float64)}
# Between these exp is a normal number.
NORMAL = {
    dtype: (math.log(torch.finfo(dtype).tiny) + 1, math.log(torch.finfo(dtype).max) - 1)
    for dtype in (torch.float32, torch.float64)
}
# Above this, products with all but the smallest numbers are normal.
SMALLEST = {dtype: torch.finfo(dtype).tiny / torch.finfo(dtype).eps for dtype in (torch.float32, torch.float64)}
# The two above as a compiled kernel needs them, of float32 and float64: least and most argument, smallest factor.
LIMITS = tuple((*NORMAL[dtype], SMALLEST[dtype]) for dtype in (torch.float32, torch.float64))
# The logarithm of the most that features may weigh in a row in which they have no mass: products stay finite.
MASSLESS = 30.0


def weight_exp_(x: Tensor) -> Tensor:
    """exp in place of log-weights: x is taken as at most 0 and at least LEAST.

    Where a weight must be exactly zero, as for tokens to come, multiply by a mask afterwards.
    """
    return x.clamp_(LEAST[x.dtype], 0.0).exp_()
