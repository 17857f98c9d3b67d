"""Rows of a given length: y = r x with r = length / |x|, and dx = r (dy - y (y . dy) / length^2).

`scratch` is the address of zeros: two rows.
"""

import math

from attngap.ops.native.memory import add, dot, give, padded, row, take
from attngap.ops.native.vectors import get, kernel, like_size, number, put


@kernel
def forward(x, length, y, factors, like, scratch, first, last):
    """Lanes first <= b * h < last; r goes to `factors`, (b, h, t, 1)."""
    pitch, least = padded(x.width, like_size(like)), number(1e-12, like)
    for lane in range(first, last):
        b, head = lane // x.heads, lane % x.heads
        for i in range(x.length):
            take(scratch, x, b, head, i, True, like)
            factor = number(length, like) / max(number(math.sqrt(dot(scratch, scratch, pitch, like)), like), least)
            put(row(factors, b, head, i), factor)
            give(y, b, head, i, scratch, factor, True, like)


@kernel
def backward(y, factors, dy, length, dx, like, scratch, first, last):
    pitch = padded(y.width, like_size(like))
    rows, grads, scale = scratch, scratch + pitch, number(-1 / length**2, like)
    for lane in range(first, last):
        b, head = lane // y.heads, lane % y.heads
        for i in range(y.length):
            take(rows, y, b, head, i, True, like)
            take(grads, dy, b, head, i, True, like)
            add(grads, scale * dot(rows, grads, pitch, like), rows, pitch, like)
            give(dx, b, head, i, grads, get(row(factors, b, head, i), like), True, like)
