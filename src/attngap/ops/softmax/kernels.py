"""Softmax of new rows over all keys up to each, compiled: a block of rows against blocks of keys, with running maxima.

A block of keys is transposed once for all rows of a block, and both products stay in cache; scratch memory does not
grow with the number of keys. Units of work are blocks of rows of one head, the last ones, which read most, first.
"""

import math
from typing import NamedTuple

import numpy as np

from attngap.ops.native.memory import clear, load_row, padded, scale_row, store_row
from attngap.ops.native.products import ROWS, multiply_matrices
from attngap.ops.native.tensors import Rows
from attngap.ops.native.vectors import (
    BYTES,
    between,
    called_kernel,
    exp,
    get,
    kernel,
    larger,
    largest,
    load,
    number,
    plus,
    put,
    size_of,
    splat,
    store,
    total,
    transpose,
)

WORD, FLAG = np.int64(0), np.uint8(0)
BLOCK = 64  # rows of a unit
TILES = 4  # vectors of keys at a time


class Inputs(NamedTuple):
    q: Rows  # (b, h, t, d)
    keys: Rows  # (b, groups, n, d), the last t of them those of the rows
    values: Rows
    out: Rows
    allowed: int  # address of (b, n) bytes: which keys may be read; 0 for all
    heads: int  # address of (count, 2) int64: a head, and the group of keys that it reads
    count: int  # of these heads
    scale: float


class Room(NamedTuple):
    """Offsets of the fields of scratch memory; sizes are in `compiled.exact_room`."""

    queries: int  # BLOCK rows, and so the next two
    weights: int
    result: int
    tile: int  # a vector of keys, before they are transposed
    keys_t: int
    values: int
    hidden: int  # what is added to the logits of keys: 0 or -inf
    top: int  # a number for each row, as the next one
    norm: int
    end: int
    guard: int


@called_kernel
def load_keys(x, b, group, start, stop, room, scratch, zero):
    """Keys, transposed, and values of one block; zeros from `stop` on."""
    n, size = BYTES // size_of(zero), size_of(zero)
    kp, vp, by_key = padded(x.keys.width, size), padded(x.values.width, size), TILES * BYTES
    for t in range(TILES):
        for j in range(n):
            i = start + t * n + j
            load_row(scratch + room.tile + j * kp, x.keys, b, group, i, i < stop, zero)
            load_row(scratch + room.values + (t * n + j) * vp, x.values, b, group, i, i < stop, zero)
        for c in range(0, kp, BYTES):
            to = scratch + room.keys_t + t * BYTES + c // size * by_key
            transpose(to, by_key, scratch + room.tile + c, kp, zero)
    if x.allowed != 0:
        for i in range(TILES * n):
            may = start + i >= stop or get(x.allowed + b * x.keys.length + start + i, FLAG) != 0
            put(scratch + room.hidden + i * size, zero if may else number(-math.inf, zero))


@called_kernel
def weigh(x, s, visible, room, scratch, zero):
    """exp(logit - largest so far) of the first `visible` keys in place; what was read before is measured anew."""
    size, n, vp = size_of(zero), BYTES // size_of(zero), padded(x.values.width, size_of(zero))
    weights = scratch + room.weights + s * TILES * BYTES
    top, norm = scratch + room.top + s * size, scratch + room.norm + s * size
    hidden = splat(number(-math.inf, zero))
    best = hidden
    for t in range(TILES):
        logit = load(weights + t * BYTES, zero)
        if x.allowed != 0:
            logit = plus(logit, load(scratch + room.hidden + t * BYTES, zero))
        logit = between(logit, 0, visible - t * n, hidden)
        store(weights + t * BYTES, logit)
        best = larger(logit, best)
    found, before = largest(best), get(top, zero)
    if found > before:
        factor = number(math.exp(before - found), zero)
        scale_row(scratch + room.result + s * vp, factor, scratch + room.result + s * vp, vp, zero)
        put(norm, get(norm, zero) * factor)
        put(top, found)
        before = found
    shift, sums = splat(-before if before > number(-math.inf, zero) else zero), splat(zero)
    for t in range(TILES):
        share = exp(plus(load(weights + t * BYTES, zero), shift))
        store(weights + t * BYTES, share)
        sums = plus(sums, share)
    put(norm, get(norm, zero) + total(sums))


@called_kernel
def attend_rows(x, b, head, group, first, count, room, scratch, zero):
    """`count` rows of a head from `first` on, at most BLOCK."""
    size, wp = size_of(zero), TILES * BYTES
    kp, vp, step = padded(x.q.width, size), padded(x.values.width, size), wp // size_of(zero)
    past = x.keys.length - x.q.length
    rows = -(-count // ROWS) * ROWS
    q, weights, result = scratch + room.queries, scratch + room.weights, scratch + room.result
    clear(result, BLOCK * vp, zero)
    for s in range(BLOCK):
        load_row(q + s * kp, x.q, b, head, first + s, s < count, zero)
        scale_row(q + s * kp, number(x.scale, zero), q + s * kp, kp, zero)
        put(scratch + room.top + s * size, number(-math.inf, zero))
        put(scratch + room.norm + s * size, zero)
    stop = past + first + count
    for start in range(0, stop, step):
        load_keys(x, b, group, start, stop, room, scratch, zero)
        keys_t, values = scratch + room.keys_t, scratch + room.values
        multiply_matrices(weights, wp, rows, wp, q, kp, size, keys_t, wp, x.q.width, False, zero)
        for s in range(count):
            weigh(x, s, past + first + s + 1 - start, room, scratch, zero)
        multiply_matrices(result, vp, rows, vp, weights, wp, size, values, vp, min(step, stop - start), True, zero)
    for s in range(count):
        norm = get(scratch + room.norm + s * size, zero)  # 0 where no key may be read, or not a number
        share = zero if norm == zero else number(1, zero) / norm
        store_row(x.out, b, head, first + s, result + s * vp, share, True, zero)


@kernel
def attend(x, room, zero, scratch, first_unit, last_unit):
    """Units first <= index < last: for each block of rows, from the last to the first, all sequences and heads."""
    blocks, each = -(-x.q.length // BLOCK), x.q.batch * x.count
    clear(scratch + room.tile, room.keys_t - room.tile - room.guard, zero)
    clear(scratch + room.queries, room.weights - room.queries - room.guard, zero)
    for unit in range(first_unit, last_unit):
        first, b, which = (blocks - 1 - unit // each) * BLOCK, unit % each // x.count, unit % x.count
        head, group = get(x.heads + 16 * which, WORD), get(x.heads + 16 * which + 8, WORD)
        attend_rows(x, b, head, group, first, min(BLOCK, x.q.length - first), room, scratch, zero)
