"""out = x W^T + bias for a few rows x: one walk through the memory of W, row after row.

A row of W stays in the nearest cache while it meets every x. Four sums side by side keep the additions from waiting
for each other. Rows are whole vectors.
"""

from typing import NamedTuple

from attngap.ops.native.vectors import BYTES, fma, get, kernel, load, load_half, plus, put, size_of, splat, total


class Room(NamedTuple):
    """Offsets into scratch memory, which this kernel has no use for."""

    end: int
    guard: int


@kernel
def weights(at, c, zero, halved):
    """A vector of a weight's row, c bytes of x from its start; widened where the weight is in bfloat16."""
    if halved is None:
        return load(at + c, zero)
    return load_half(at + c // 2, zero)


@kernel
def multiply(weight, bias, x, out, rows, width, outputs, halved, zero, scratch, first, last):
    """Outputs first to last of weight (outputs, width) and x (rows, width), given by addresses of tensors without gaps.

    A bias at 0 is none. With `halved` the weight is in bfloat16 and all else in float32.
    """
    size = size_of(zero)
    by_row = width * size
    by_output = by_row if halved is None else by_row // 2
    for o in range(first, last):
        at, start = weight + o * by_output, zero if bias == 0 else get(bias + o * size, zero)
        for r in range(rows):
            s, t, u, v = splat(zero), splat(zero), splat(zero), splat(zero)
            to, c = x + r * by_row, 0
            while c + 4 * BYTES <= by_row:
                s = fma(weights(at, c, zero, halved), load(to + c, zero), s)
                t = fma(weights(at, c + BYTES, zero, halved), load(to + c + BYTES, zero), t)
                u = fma(weights(at, c + 2 * BYTES, zero, halved), load(to + c + 2 * BYTES, zero), u)
                v = fma(weights(at, c + 3 * BYTES, zero, halved), load(to + c + 3 * BYTES, zero), v)
                c += 4 * BYTES
            while c < by_row:
                s = fma(weights(at, c, zero, halved), load(to + c, zero), s)
                c += BYTES
            put(out + (r * outputs + o) * size, start + total(plus(plus(s, t), plus(u, v))))
