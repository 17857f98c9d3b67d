"""Rows of a given length: y = r x with r = length / |x|, and dx = r (dy - y (y . dy) / length^2).

Rows that are whole vectors are read and written where they are, others by way of `scratch`, the address of three rows
of zeros.
"""

import math

from attngap.ops.native.memory import add, dot, load_row, padded, row, scale_row, store_row
from attngap.ops.native.vectors import BYTES, get, kernel, number, put, size_of


@kernel
def forward(x, length, y, factors, zero, scratch, first, last):
    """Lanes first <= b * h < last; r goes to `factors`, (b, h, t, 1)."""
    least, whole = number(1e-12, zero), is_whole(x, zero) and is_whole(y, zero)
    size = x.width * size_of(zero) if whole else padded(x.width, size_of(zero))
    for lane in range(first, last):
        b, head = lane // x.heads, lane % x.heads
        for i in range(x.length):
            at = find(scratch, x, b, head, i, whole, zero)
            factor = number(length, zero) / max(number(math.sqrt(dot(at, at, size, zero)), zero), least)
            put(row(factors, b, head, i), factor)
            if whole:
                scale_row(row(y, b, head, i), factor, at, size, zero)
            else:
                store_row(y, b, head, i, at, factor, True, zero)


@kernel
def backward(y, factors, dy, length, dx, zero, scratch, first, last):
    scale, whole = number(-1 / length**2, zero), is_whole(y, zero) and is_whole(dy, zero) and is_whole(dx, zero)
    size, pitch = y.width * size_of(zero), padded(y.width, size_of(zero))
    size = size if whole else pitch
    for lane in range(first, last):
        b, head = lane // y.heads, lane % y.heads
        for i in range(y.length):
            rows = find(scratch, y, b, head, i, whole, zero)
            grads = find(scratch + pitch, dy, b, head, i, whole, zero)
            factor = get(row(factors, b, head, i), zero)
            to = row(dx, b, head, i) if whole else scratch + 2 * pitch
            scale_row(to, factor, grads, size, zero)
            add(to, factor * scale * dot(rows, grads, size, zero), rows, size, zero)
            if not whole:
                store_row(dx, b, head, i, to, number(1, zero), True, zero)


@kernel
def is_whole(x, zero):
    return x.by_column == size_of(zero) and x.width * size_of(zero) % BYTES == 0


@kernel
def find(buffer, x, b, head, i, whole, zero):
    """The address of a row: where it is, or of a copy."""
    if whole:
        return row(x, b, head, i)
    load_row(buffer, x, b, head, i, True, zero)
    return buffer
