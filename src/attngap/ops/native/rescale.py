"""Rows of a given length: y = r x with r = length / |x|, and dx = r (dy - y (y . dy) / length^2).

Rows that are whole vectors are read and written where they are, others by way of `scratch`, the address of three rows
of zeros.
"""

import math

from attngap.ops.native.memory import add, dot, give, padded, row, spread, take
from attngap.ops.native.vectors import BYTES, get, kernel, like_size, number, put


@kernel
def forward(x, length, y, factors, like, scratch, first, last):
    """Lanes first <= b * h < last; r goes to `factors`, (b, h, t, 1)."""
    least, whole = number(1e-12, like), is_whole(x, like) and is_whole(y, like)
    size = x.width * like_size(like) if whole else padded(x.width, like_size(like))
    for lane in range(first, last):
        b, head = lane // x.heads, lane % x.heads
        for i in range(x.length):
            at = find(scratch, x, b, head, i, whole, like)
            factor = number(length, like) / max(number(math.sqrt(dot(at, at, size, like)), like), least)
            put(row(factors, b, head, i), factor)
            if whole:
                spread(row(y, b, head, i), factor, at, size, like)
            else:
                give(y, b, head, i, at, factor, True, like)


@kernel
def backward(y, factors, dy, length, dx, like, scratch, first, last):
    scale, whole = number(-1 / length**2, like), is_whole(y, like) and is_whole(dy, like) and is_whole(dx, like)
    size, pitch = y.width * like_size(like), padded(y.width, like_size(like))
    size = size if whole else pitch
    for lane in range(first, last):
        b, head = lane // y.heads, lane % y.heads
        for i in range(y.length):
            rows = find(scratch, y, b, head, i, whole, like)
            grads = find(scratch + pitch, dy, b, head, i, whole, like)
            factor = get(row(factors, b, head, i), like)
            to = row(dx, b, head, i) if whole else scratch + 2 * pitch
            spread(to, factor, grads, size, like)
            add(to, factor * scale * dot(rows, grads, size, like), rows, size, like)
            if not whole:
                give(dx, b, head, i, to, number(1, like), True, like)


@kernel
def is_whole(x, like):
    return x.by_column == like_size(like) and x.width * like_size(like) % BYTES == 0


@kernel
def find(buffer, x, b, head, i, whole, like):
    """The address of a row: where it is, or of a copy."""
    if whole:
        return row(x, b, head, i)
    take(buffer, x, b, head, i, True, like)
    return buffer
