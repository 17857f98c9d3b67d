"""A memory S (rows, columns) that outer products are added to and vectors are read from, two tokens at a time.

Linear attention, the delta rule and every gradient of them are this one loop with other names: see `update_and_read`.
A state is laid out in panels as wide as two vectors, row after row, so that a panel is walked without gaps while the
vectors that are read stay in registers. A state no wider than one vector is a single panel of that width, walked two
rows at a time: half of a wider one would be zeros.

Kernels know memory by its address: views of arrays would be counted, and threads would wait for each other's counts.
What two tokens bring lies in a pair of buffers, `pitch` bytes apart and filled up with zeros. `zero` is a zero of the
type that is computed in.
"""

import math

from attngap.ops.native import PANEL
from attngap.ops.native.vectors import (
    BYTES,
    exp,
    fma,
    get,
    kernel,
    load,
    number,
    plus,
    put,
    size_of,
    splat,
    store,
    times,
    total,
)
from attngap.ops.normalizer import EPS


@kernel
def padded(width, size):
    """Bytes of a row in a buffer: one vector, or whole panels."""
    return BYTES if width * size <= BYTES else -(-width * size // PANEL) * PANEL


@kernel
def row(x, b, head, i):
    """The address of a row of a tensor."""
    return x.address + b * x.by_batch + head * x.by_head + i * x.by_row


@kernel
def update_and_read(S, rows, width, write, value, read, out, by_row, by_column, pitch, zero):
    """For token 0, then token 1: S <- gate * S + write^T value; out = read S.

    `width` is that of a row of S in bytes. A gate is one number a row, or one a column, or None.
    """
    if width == BYTES:
        update_and_read_narrow(S, rows, write, value, read, out, by_row, by_column, pitch, zero)
        return
    size, zeros = size_of(zero), splat(zero)
    for c in range(0, width, PANEL):
        d, at = c + BYTES, S + c * rows
        a, b = load(value + c, zero), load(value + d, zero)
        e, f = load(value + pitch + c, zero), load(value + pitch + d, zero)
        s, t, u, v = zeros, zeros, zeros, zeros
        for r in range(0, rows * size, size):
            x, y = load(at, zero), load(at + BYTES, zero)
            if by_row is not None:
                gate = splat(get(by_row + r, zero))
                x, y = times(gate, x), times(gate, y)
            if by_column is not None:
                x, y = times(load(by_column + c, zero), x), times(load(by_column + d, zero), y)
            written, seen = splat(get(write + r, zero)), splat(get(read + r, zero))
            x, y = fma(written, a, x), fma(written, b, y)
            s, t = fma(seen, x, s), fma(seen, y, t)
            if by_row is not None:
                gate = splat(get(by_row + pitch + r, zero))
                x, y = times(gate, x), times(gate, y)
            if by_column is not None:
                x, y = times(load(by_column + pitch + c, zero), x), times(load(by_column + pitch + d, zero), y)
            written, seen = splat(get(write + pitch + r, zero)), splat(get(read + pitch + r, zero))
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
def update_and_read_narrow(S, rows, write, value, read, out, by_row, by_column, pitch, zero):
    """Where a row is one vector: even and odd rows side by side, so that fewer sums wait for each other."""
    size, zeros = size_of(zero), splat(zero)
    a, e = load(value, zero), load(value + pitch, zero)
    s, t, u, v = zeros, zeros, zeros, zeros
    for r in range(0, rows // 2 * 2 * size, 2 * size):
        at = S + r // size * BYTES
        x, s, u = row_narrow(at, r, a, e, write, read, by_row, by_column, s, u, pitch, zero)
        y, t, v = row_narrow(at + BYTES, r + size, a, e, write, read, by_row, by_column, t, v, pitch, zero)
        store(at, x)
        store(at + BYTES, y)
    if rows % 2:
        at = S + (rows - 1) * BYTES
        x, s, u = row_narrow(at, (rows - 1) * size, a, e, write, read, by_row, by_column, s, u, pitch, zero)
        store(at, x)
    store(out, plus(s, t))
    store(out + pitch, plus(u, v))


@kernel
def row_narrow(at, r, a, e, write, read, by_row, by_column, s, u, pitch, zero):
    """The row after both tokens, and what they have read so far."""
    x = load(at, zero)
    if by_row is not None:
        x = times(splat(get(by_row + r, zero)), x)
    if by_column is not None:
        x = times(load(by_column, zero), x)
    x = fma(splat(get(write + r, zero)), a, x)
    s = fma(splat(get(read + r, zero)), x, s)
    if by_row is not None:
        x = times(splat(get(by_row + pitch + r, zero)), x)
    if by_column is not None:
        x = times(load(by_column + pitch, zero), x)
    x = fma(splat(get(write + pitch + r, zero)), e, x)
    return x, s, fma(splat(get(read + pitch + r, zero)), x, u)


@kernel
def read_state(S, rows, width, read, out, pitch, zero):
    """out = read S for both tokens; S stays."""
    if width == BYTES:
        read_narrow(S, rows, read, out, pitch, zero)
        return
    size, zeros = size_of(zero), splat(zero)
    for c in range(0, width, PANEL):
        at = S + c * rows
        s, t, u, v = zeros, zeros, zeros, zeros
        for r in range(0, rows * size, size):
            x, y = load(at, zero), load(at + BYTES, zero)
            seen = splat(get(read + r, zero))
            s, t = fma(seen, x, s), fma(seen, y, t)
            seen = splat(get(read + pitch + r, zero))
            u, v = fma(seen, x, u), fma(seen, y, v)
            at += PANEL
        store(out + c, s)
        store(out + c + BYTES, t)
        store(out + pitch + c, u)
        store(out + pitch + c + BYTES, v)


@kernel
def read_narrow(S, rows, read, out, pitch, zero):
    size, zeros = size_of(zero), splat(zero)
    s, t, u, v = zeros, zeros, zeros, zeros
    for r in range(0, rows // 2 * 2 * size, 2 * size):
        x, y = load(S + r // size * BYTES, zero), load(S + r // size * BYTES + BYTES, zero)
        s, u = fma(splat(get(read + r, zero)), x, s), fma(splat(get(read + pitch + r, zero)), x, u)
        r += size
        t, v = fma(splat(get(read + r, zero)), y, t), fma(splat(get(read + pitch + r, zero)), y, v)
    if rows % 2:
        r = (rows - 1) * size
        x = load(S + (rows - 1) * BYTES, zero)
        s, u = fma(splat(get(read + r, zero)), x, s), fma(splat(get(read + pitch + r, zero)), x, u)
    store(out, plus(s, t))
    store(out + pitch, plus(u, v))


@kernel
def dot(x, y, pitch, zero):
    found = splat(zero)
    for c in range(0, pitch, BYTES):
        found = fma(load(x + c, zero), load(y + c, zero), found)
    return total(found)


@kernel
def add(y, factor, x, pitch, zero):
    """y <- y + factor x."""
    factors = splat(factor)
    for c in range(0, pitch, BYTES):
        store(y + c, fma(factors, load(x + c, zero), load(y + c, zero)))


@kernel
def multiply(out, x, y, pitch, zero):
    """out <- x * y."""
    for c in range(0, pitch, BYTES):
        store(out + c, times(load(x + c, zero), load(y + c, zero)))


@kernel
def scale_row(out, factor, x, pitch, zero):
    """out <- factor x."""
    factors = splat(factor)
    for c in range(0, pitch, BYTES):
        store(out + c, times(factors, load(x + c, zero)))


@kernel
def load_row(buffer, x, b, head, i, real, zero):
    """The row of a tensor; zeros where there is no token."""
    size, at, gap = size_of(zero), row(x, b, head, i), x.by_column
    whole = x.width * size // BYTES * BYTES if gap == size or gap == 0 else 0
    if real:
        if gap == 0:  # one number for all, as in the gradient of a sum
            same = splat(get(at, zero))
            for c in range(0, whole, BYTES):
                store(buffer + c, same)
        else:
            for c in range(0, whole, BYTES):
                store(buffer + c, load(at + c, zero))
        for c in range(whole // size, x.width):
            put(buffer + c * size, get(at + c * gap, zero))
    else:
        for c in range(0, padded(x.width, size), BYTES):
            store(buffer + c, splat(zero))


@kernel
def load_gate(buffer, x, b, head, i, real, pitch, zero):
    """exp of a row of log-decays, or of its one number, in every place; 1 where there is no token."""
    size, at = size_of(zero), row(x, b, head, i)
    if real and x.width > 1:
        whole = x.width * size // BYTES * BYTES if x.by_column == size else 0
        for c in range(0, whole, BYTES):
            store(buffer + c, exp(load(at + c, zero)))
        for c in range(whole // size, x.width):
            put(buffer + c * size, math.exp(get(at + c * x.by_column, zero)))
    else:
        gate = exp(splat(get(at, zero) if real else zero))
        for c in range(0, pitch, BYTES):
            store(buffer + c, gate)


@kernel
def store_row(x, b, head, i, buffer, factor, fresh, zero):
    """The row of a tensor <- factor * buffer, added to what is there unless `fresh`."""
    size, at, gap, factors = size_of(zero), row(x, b, head, i), x.by_column, splat(factor)
    whole = x.width * size // BYTES * BYTES if gap == size else 0
    for c in range(0, whole, BYTES):
        found = times(factors, load(buffer + c, zero))
        store(at + c, found if fresh else plus(found, load(at + c, zero)))
    for c in range(whole // size, x.width):
        found = factor * get(buffer + c * size, zero)
        put(at + c * gap, found if fresh else found + get(at + c * gap, zero))


@kernel
def clear(at, size, zero):
    for c in range(0, size, BYTES):
        store(at + c, splat(zero))


@kernel
def clear_fields(scratch, room, zero):
    """All scratch memory but its guards: `room` are the offsets of its fields, the end, and the size of a guard."""
    for i in range(len(room) - 2):
        clear(scratch + room[i], room[i + 1] - room[i] - room.guard, zero)


@kernel
def cell(S, rows, columns, r, c, size):
    """The address of an element of a state."""
    wide = min(padded(columns, size), PANEL) // size
    return S + ((c // wide * rows + r) * wide + c % wide) * size


@kernel
def load_state(S, x, b, head, transposed, zero):
    """A matrix, or its transpose, as a state."""
    size = size_of(zero)
    rows, columns = (x.width, x.length) if transposed else (x.length, x.width)
    clear(S, rows * padded(columns, size), zero)
    for r in range(rows):
        for c in range(columns):
            i, j = (c, r) if transposed else (r, c)
            put(cell(S, rows, columns, r, c, size), get(row(x, b, head, i) + j * x.by_column, zero))


@kernel
def store_state(x, b, head, S, fresh, zero):
    """A state as a matrix, added to what is there unless `fresh`."""
    for r in range(x.length):
        for c in range(x.width):
            found, at = (
                get(cell(S, x.length, x.width, r, c, size_of(zero)), zero),
                row(x, b, head, r) + c * x.by_column,
            )
            put(at, found if fresh else found + get(at, zero))


@kernel
def safe(n, zero):
    """|n| below EPS becomes EPS with the sign of n."""
    eps = number(EPS, zero)
    if abs(n) < eps:
        return -eps if n < 0 else eps
    return n
