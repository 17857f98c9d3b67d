"""A memory S (rows, columns) that outer products are added to and vectors are read from, two tokens at a time.

Linear attention, the delta rule and every gradient of them are this one loop with other names: see `turn`. A state is
laid out in panels as wide as two vectors, row after row, so that a panel is walked without gaps while the vectors that
are read stay in registers. A state no wider than one vector is a single panel of that width, walked two rows at a time:
half of a wider one would be zeros.

Kernels know memory by its address: views of arrays would be counted, and threads would wait for each other's counts.
What two tokens bring lies in a pair of buffers, `pitch` bytes apart and filled up with zeros. `like` is a zero of the
type that is computed in.
"""

import math
from typing import NamedTuple

from attngap.ops.native import PANEL
from attngap.ops.native.vectors import (
    BYTES,
    exp,
    fma,
    get,
    kernel,
    like_size,
    load,
    plus,
    put,
    splat,
    store,
    times,
    total,
)


class Rows(NamedTuple):
    """A tensor (batch, heads, length, width), its strides in bytes."""

    address: int
    batch: int
    heads: int
    length: int
    width: int
    by_batch: int
    by_head: int
    by_row: int
    by_column: int


@kernel
def padded(width, size):
    """Bytes of a row in a buffer: one vector, or whole panels."""
    return BYTES if width * size <= BYTES else -(-width * size // PANEL) * PANEL


@kernel
def row(x, b, head, i):
    """The address of a row of a tensor."""
    return x.address + b * x.by_batch + head * x.by_head + i * x.by_row


@kernel
def turn(S, rows, width, write, value, read, out, by_row, by_column, pitch, like):
    """For token 0, then token 1: S <- gate * S + write^T value; out = read S.

    `width` is that of a row of S in bytes. A gate is one number a row, or one a column, or None.
    """
    if width == BYTES:
        turn_narrow(S, rows, write, value, read, out, by_row, by_column, pitch, like)
        return
    size, zero = like_size(like), splat(like)
    for c in range(0, width, PANEL):
        d, at = c + BYTES, S + c * rows
        a, b = load(value + c, like), load(value + d, like)
        e, f = load(value + pitch + c, like), load(value + pitch + d, like)
        s, t, u, v = zero, zero, zero, zero
        for r in range(0, rows * size, size):
            x, y = load(at, like), load(at + BYTES, like)
            if by_row is not None:
                gate = splat(get(by_row + r, like))
                x, y = times(gate, x), times(gate, y)
            if by_column is not None:
                x, y = times(load(by_column + c, like), x), times(load(by_column + d, like), y)
            written, seen = splat(get(write + r, like)), splat(get(read + r, like))
            x, y = fma(written, a, x), fma(written, b, y)
            s, t = fma(seen, x, s), fma(seen, y, t)
            if by_row is not None:
                gate = splat(get(by_row + pitch + r, like))
                x, y = times(gate, x), times(gate, y)
            if by_column is not None:
                x, y = times(load(by_column + pitch + c, like), x), times(load(by_column + pitch + d, like), y)
            written, seen = splat(get(write + pitch + r, like)), splat(get(read + pitch + r, like))
            x, y = fma(written, e, x), fma(written, f, y)
            u, v = fma(seen, x, u), fma(seen, y, v)
            store(at, x)
            store(at + BYTES, y)
            at += PANEL
        store(out + c, s)
        store(out + d, t)
        store(out + pitch + c, u)
        store(out + pitch + d, v)


@kernel
def turn_narrow(S, rows, write, value, read, out, by_row, by_column, pitch, like):
    """Where a row is one vector: even and odd rows side by side, so that fewer sums wait for each other."""
    size, zero = like_size(like), splat(like)
    a, e = load(value, like), load(value + pitch, like)
    s, t, u, v = zero, zero, zero, zero
    for r in range(0, rows // 2 * 2 * size, 2 * size):
        at = S + r // size * BYTES
        x, s, u = row_narrow(at, r, a, e, write, read, by_row, by_column, s, u, pitch, like)
        y, t, v = row_narrow(at + BYTES, r + size, a, e, write, read, by_row, by_column, t, v, pitch, like)
        store(at, x)
        store(at + BYTES, y)
    if rows % 2:
        at = S + (rows - 1) * BYTES
        x, s, u = row_narrow(at, (rows - 1) * size, a, e, write, read, by_row, by_column, s, u, pitch, like)
        store(at, x)
    store(out, plus(s, t))
    store(out + pitch, plus(u, v))


@kernel
def row_narrow(at, r, a, e, write, read, by_row, by_column, s, u, pitch, like):
    """The row after both tokens, and what they have read so far."""
    x = load(at, like)
    if by_row is not None:
        x = times(splat(get(by_row + r, like)), x)
    if by_column is not None:
        x = times(load(by_column, like), x)
    x = fma(splat(get(write + r, like)), a, x)
    s = fma(splat(get(read + r, like)), x, s)
    if by_row is not None:
        x = times(splat(get(by_row + pitch + r, like)), x)
    if by_column is not None:
        x = times(load(by_column + pitch, like), x)
    x = fma(splat(get(write + pitch + r, like)), e, x)
    return x, s, fma(splat(get(read + pitch + r, like)), x, u)


@kernel
def ask(S, rows, width, read, out, pitch, like):
    """out = read S for both tokens; S stays."""
    if width == BYTES:
        ask_narrow(S, rows, read, out, pitch, like)
        return
    size, zero = like_size(like), splat(like)
    for c in range(0, width, PANEL):
        at = S + c * rows
        s, t, u, v = zero, zero, zero, zero
        for r in range(0, rows * size, size):
            x, y = load(at, like), load(at + BYTES, like)
            seen = splat(get(read + r, like))
            s, t = fma(seen, x, s), fma(seen, y, t)
            seen = splat(get(read + pitch + r, like))
            u, v = fma(seen, x, u), fma(seen, y, v)
            at += PANEL
        store(out + c, s)
        store(out + c + BYTES, t)
        store(out + pitch + c, u)
        store(out + pitch + c + BYTES, v)


@kernel
def ask_narrow(S, rows, read, out, pitch, like):
    size, zero = like_size(like), splat(like)
    s, t, u, v = zero, zero, zero, zero
    for r in range(0, rows // 2 * 2 * size, 2 * size):
        x, y = load(S + r // size * BYTES, like), load(S + r // size * BYTES + BYTES, like)
        s, u = fma(splat(get(read + r, like)), x, s), fma(splat(get(read + pitch + r, like)), x, u)
        r += size
        t, v = fma(splat(get(read + r, like)), y, t), fma(splat(get(read + pitch + r, like)), y, v)
    if rows % 2:
        r = (rows - 1) * size
        x = load(S + (rows - 1) * BYTES, like)
        s, u = fma(splat(get(read + r, like)), x, s), fma(splat(get(read + pitch + r, like)), x, u)
    store(out, plus(s, t))
    store(out + pitch, plus(u, v))


@kernel
def dot(x, y, pitch, like):
    found = splat(like)
    for c in range(0, pitch, BYTES):
        found = fma(load(x + c, like), load(y + c, like), found)
    return total(found)


@kernel
def add(y, factor, x, pitch, like):
    """y <- y + factor x."""
    factors = splat(factor)
    for c in range(0, pitch, BYTES):
        store(y + c, fma(factors, load(x + c, like), load(y + c, like)))


@kernel
def multiply(out, x, y, pitch, like):
    """out <- x * y."""
    for c in range(0, pitch, BYTES):
        store(out + c, times(load(x + c, like), load(y + c, like)))


@kernel
def spread(out, factor, x, pitch, like):
    """out <- factor x."""
    factors = splat(factor)
    for c in range(0, pitch, BYTES):
        store(out + c, times(factors, load(x + c, like)))


@kernel
def take(buffer, x, b, head, i, there, like):
    """The row of a tensor; zeros where there is no token."""
    size, at, gap = like_size(like), row(x, b, head, i), x.by_column
    whole = x.width * size // BYTES * BYTES if gap == size else 0
    if there:
        for c in range(0, whole, BYTES):
            store(buffer + c, load(at + c, like))
        for c in range(whole // size, x.width):
            put(buffer + c * size, get(at + c * gap, like))
    else:
        for c in range(0, padded(x.width, size), BYTES):
            store(buffer + c, splat(like))


@kernel
def take_gate(buffer, x, b, head, i, there, pitch, like):
    """exp of a row of log-decays, or of its one number, in every place; 1 where there is no token."""
    size, at = like_size(like), row(x, b, head, i)
    if there and x.width > 1:
        whole = x.width * size // BYTES * BYTES if x.by_column == size else 0
        for c in range(0, whole, BYTES):
            store(buffer + c, exp(load(at + c, like)))
        for c in range(whole // size, x.width):
            put(buffer + c * size, math.exp(get(at + c * x.by_column, like)))
    else:
        number = exp(splat(get(at, like) if there else like))
        for c in range(0, pitch, BYTES):
            store(buffer + c, number)


@kernel
def give(x, b, head, i, buffer, factor, fresh, like):
    """The row of a tensor <- factor * buffer, added to what is there unless `fresh`."""
    size, at, gap, factors = like_size(like), row(x, b, head, i), x.by_column, splat(factor)
    whole = x.width * size // BYTES * BYTES if gap == size else 0
    for c in range(0, whole, BYTES):
        found = times(factors, load(buffer + c, like))
        store(at + c, found if fresh else plus(found, load(at + c, like)))
    for c in range(whole // size, x.width):
        found = factor * get(buffer + c * size, like)
        put(at + c * gap, found if fresh else found + get(at + c * gap, like))


@kernel
def clear(at, size, like):
    for c in range(0, size, BYTES):
        store(at + c, splat(like))


@kernel
def cell(S, rows, columns, r, c, size):
    """The address of an element of a state."""
    wide = min(padded(columns, size), PANEL) // size
    return S + ((c // wide * rows + r) * wide + c % wide) * size


@kernel
def enter(S, x, b, head, turned, like):
    """A matrix, or its transpose, as a state."""
    size = like_size(like)
    rows, columns = (x.width, x.length) if turned else (x.length, x.width)
    clear(S, rows * padded(columns, size), like)
    for r in range(rows):
        for c in range(columns):
            i, j = (c, r) if turned else (r, c)
            put(cell(S, rows, columns, r, c, size), get(row(x, b, head, i) + j * x.by_column, like))


@kernel
def leave(x, b, head, S, fresh, like):
    """A state as a matrix, added to what is there unless `fresh`."""
    for r in range(x.length):
        for c in range(x.width):
            found, at = (
                get(cell(S, x.length, x.width, r, c, like_size(like)), like),
                row(x, b, head, r) + c * x.by_column,
            )
            put(at, found if fresh else found + get(at, like))
