"""out = weight * x / sqrt(mean(x^2) + eps), row by row. Rows are whole vectors."""

import math

from attngap.ops.native.memory import dot
from attngap.ops.native.vectors import BYTES, kernel, load, number, size_of, splat, store, times


@kernel
def normalize(weight, x, out, width, eps, zero, scratch, first, last):
    """Rows first to last of x and out (rows, width), given by addresses of tensors without gaps."""
    by_row = width * size_of(zero)
    for i in range(first, last):
        at, to = x + i * by_row, out + i * by_row
        mean = dot(at, at, by_row, zero) / number(width, zero)
        factor = splat(number(1 / math.sqrt(mean + eps), zero))
        for c in range(0, by_row, BYTES):
            store(to + c, times(load(weight + c, zero), times(load(at + c, zero), factor)))
