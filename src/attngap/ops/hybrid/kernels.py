"""Hybrid attention, compiled: a block of rows against the band of keys around them, as a few products in cache.

Keys that are no sinks lie on one timeline, `kept` ones of the state and then the new ones, cut into tiles as long as a
vector has places. The block of rows j is tile j of the queries. Its band are the `band` tiles up to j: what is earlier
is far for all of its rows and summed up in S and z; what is in it is near, or far by a staircase through its first one
or two tiles (see `layout`). A row's weights on sinks, band and features stand side by side, and so do their values, the
last of which are the rows of S: all of a block's output is one product.

    weights  sinks | band | c fq          keys_t  (d, sinks | band), transposed
    values   sinks | band | S             each tile of the band in slot tile % band, sinks at the end of theirs

Heads that share keys are one lane: they use the same tiles and the same sums.
"""

import math
from typing import NamedTuple

import numpy as np

from attngap.ops.exponent import LIMITS, MASSLESS
from attngap.ops.hybrid.kernels_rows import add_to_row, clear, dot, load_row, scale_row, set_row
from attngap.ops.native.memory import clear_fields, padded, row, safe
from attngap.ops.native.products import ROWS, multiply_matrices
from attngap.ops.native.tensors import Rows
from attngap.ops.native.vectors import (
    BYTES,
    between,
    called_kernel,
    exp,
    fma,
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

WORD = np.int64(0)


class Inputs(NamedTuple):
    q: Rows
    k: Rows
    v: Rows
    fq: Rows
    fk: Rows
    gain: Rows  # (b, h, t, 1)
    past_k: Rows  # (b, h_kv, sinks + window, d), the ring that `state` describes
    past_v: Rows
    past_fk: Rows  # (b, h_kv, window, r)
    S: Rows
    z: Rows  # (b, h_kv, r, 1)
    seen: int  # address of (b,) int64: tokens before this piece
    lengths: int  # address of (b,) int64: real tokens of this piece
    tokens: int  # address of (b, t) int64: where they are; 0 if there is no padding


class Options(NamedTuple):
    window: int
    sinks: int
    sink_tiles: int
    band: int  # tiles
    scale: float
    relative: bool
    far: bool  # are there features
    given: bool  # is the near part there already


class Results(NamedTuple):
    out: Rows
    S: Rows
    z: Rows


class Stats(NamedTuple):
    """What the backward needs of each row, (b, h, t, 1): its log-unit m, its normalizer n, and c."""

    unit: Rows
    norm: Rows
    coefficient: Rows


class Near(NamedTuple):
    """The near part of the rows, computed before: see `blocks.Near`."""

    out: Rows
    top: Rows
    log_mass: Rows


class Room(NamedTuple):
    """Offsets of the fields of scratch memory; sizes are in `compiled.forward_room`."""

    keys_t: int
    values: int  # the sinks, the band and, right behind them, S
    weights: int
    queries: int
    fq: int
    fk: int  # two tiles of features
    fk_t: int  # the same, transposed
    scores: int  # fq fk^T
    rows: int
    z: int
    tile: int  # one tile of keys, before it is transposed
    end: int
    guard: int


class Lane(NamedTuple):
    """One sequence and key head, and where its tokens are."""

    b: int
    kv: int
    old_sinks: int
    new_sinks: int
    kept: int
    oldest: int  # the place of timeline token 0 in the ring
    total: int  # tokens of the timeline


class Block(NamedTuple):
    """Rows of the piece: `count` from `first` on, in the slots from `slot` on; `tile` is -1 for rows of new sinks."""

    tile: int
    slot: int
    first: int
    count: int


@kernel
def find_lane(x, o, lane):
    b, kv = lane // x.k.heads, lane % x.k.heads
    seen, length = get(x.seen + 8 * b, WORD), get(x.lengths + 8 * b, WORD)
    old_sinks = min(seen, o.sinks)
    new_sinks = min(o.sinks - old_sinks, length)
    kept = min(seen - old_sinks, o.window)
    return Lane(b, kv, old_sinks, new_sinks, kept, seen - old_sinks - kept, kept + length - new_sinks)


@kernel
def token(x, b, i):
    """Where real token i of the piece is."""
    if x.tokens == 0:
        return i
    return get(x.tokens + 8 * (b * x.q.length + i), WORD)


@called_kernel
def load_past_or_new(buffer, past, new, skip, x, o, lane, a, zero):
    """Token a of the timeline; the ring of `past` begins after `skip` slots."""
    if a < lane.kept:
        load_row(buffer, past, lane.b, lane.kv, skip + (lane.oldest + a) % o.window, zero)
    else:
        load_row(buffer, new, lane.b, lane.kv, token(x, lane.b, a - lane.kept + lane.new_sinks), zero)


@kernel
def lanes_of(zero):
    return BYTES // size_of(zero)


@called_kernel
def transpose_tile(to, by_to, tile, pitch, zero):
    """A tile of rows as a column of vectors."""
    n = lanes_of(zero)
    for c in range(0, pitch, BYTES):
        transpose(to + c // BYTES * n * by_to, by_to, tile + c, pitch, zero)


@called_kernel
def load_sinks(x, o, lane, room, scratch, zero):
    """Old and new sinks, at the end of their columns."""
    n = lanes_of(zero)
    kp, vp, by_key = padded(x.k.width, size_of(zero)), padded(x.v.width, size_of(zero)), (o.sink_tiles + o.band) * BYTES
    empty = o.sink_tiles * n - lane.old_sinks - lane.new_sinks
    for t in range(o.sink_tiles):
        clear(scratch + room.tile, n * kp, zero)
        for j in range(n):
            i = t * n + j - empty
            value = scratch + room.values + (t * n + j) * vp
            if i < 0:
                clear(value, vp, zero)
            elif i < lane.old_sinks:
                load_row(scratch + room.tile + j * kp, x.past_k, lane.b, lane.kv, i, zero)
                load_row(value, x.past_v, lane.b, lane.kv, i, zero)
            else:
                at = token(x, lane.b, i - lane.old_sinks)
                load_row(scratch + room.tile + j * kp, x.k, lane.b, lane.kv, at, zero)
                load_row(value, x.v, lane.b, lane.kv, at, zero)
        transpose_tile(scratch + room.keys_t + t * BYTES, by_key, scratch + room.tile, kp, zero)


@called_kernel
def load_band_tile(x, o, lane, room, scratch, u, zero):
    """Keys and values of tile u in its slot; zeros where there is no token."""
    n = lanes_of(zero)
    kp, vp, by_key = padded(x.k.width, size_of(zero)), padded(x.v.width, size_of(zero)), (o.sink_tiles + o.band) * BYTES
    slot = o.sink_tiles + u % o.band
    for j in range(n):
        a, key, value = u * n + j, scratch + room.tile + j * kp, scratch + room.values + (slot * n + j) * vp
        if 0 <= a < lane.total:
            load_past_or_new(key, x.past_k, x.k, o.sinks, x, o, lane, a, zero)
            load_past_or_new(value, x.past_v, x.v, o.sinks, x, o, lane, a, zero)
        else:
            clear(key, kp, zero)
            clear(value, vp, zero)
    transpose_tile(scratch + room.keys_t + slot * BYTES, by_key, scratch + room.tile, kp, zero)


@called_kernel
def load_features(x, o, lane, room, scratch, u, tiles, zero):
    """Features of the tiles from u on, and their transpose."""
    n, fp = lanes_of(zero), padded(x.fk.width, size_of(zero))
    for t in range(tiles):
        tile = scratch + room.fk + t * n * fp
        for j in range(n):
            a = (u + t) * n + j
            if 0 <= a < lane.total:
                load_past_or_new(tile + j * fp, x.past_fk, x.fk, 0, x, o, lane, a, zero)
            else:
                clear(tile + j * fp, fp, zero)
        transpose_tile(scratch + room.fk_t + t * BYTES, 2 * BYTES, tile, fp, zero)


@kernel
def far_tiles(o, j, zero):
    """The first tile of the band of block j, and how many of its tiles hold keys that are far for some row."""
    n = lanes_of(zero)
    first, last = j - o.band + 1, (j * n + n - 1 - o.window) // n
    return first, last - first + 1 if o.far and last >= 0 else 0


@called_kernel
def absorb(x, o, room, scratch, u, start, count, zero):
    """S and z take in `count` tokens of tile u, whose features begin at `start`; their values are in the band."""
    size, n = size_of(zero), lanes_of(zero)
    fp, vp = padded(x.fk.width, size), padded(x.v.width, size)
    S = scratch + room.values + (o.sink_tiles + o.band) * n * vp
    V = scratch + room.values + (o.sink_tiles + u % o.band) * n * vp
    multiply_matrices(S, vp, -(-x.fk.width // ROWS) * ROWS, vp, start, size, fp, V, vp, count, True, zero)
    for c in range(0, fp, BYTES):
        sums = load(scratch + room.z + c, zero)
        for j in range(count):
            sums = plus(sums, load(start + j * fp + c, zero))
        store(scratch + room.z + c, sums)


@called_kernel
def load_sums(x, o, lane, room, scratch, zero):
    """S behind the values of the band, and z."""
    vp = padded(x.v.width, size_of(zero))
    S = scratch + room.values + (o.sink_tiles + o.band) * lanes_of(zero) * vp
    clear(scratch + room.z, padded(x.fk.width, size_of(zero)), zero)
    for c in range(x.S.length):
        load_row(S + c * vp, x.S, lane.b, lane.kv, c, zero)
        put(scratch + room.z + c * size_of(zero), get(row(x.z, lane.b, lane.kv, c), zero))


@called_kernel
def store_sums(x, o, to, lane, room, scratch, zero):
    vp = padded(x.v.width, size_of(zero))
    S = scratch + room.values + (o.sink_tiles + o.band) * lanes_of(zero) * vp
    for c in range(x.S.length):
        set_row(to.S, lane.b, lane.kv, c, S + c * vp, number(1, zero), zero)
        put(row(to.z, lane.b, lane.kv, c), get(scratch + room.z + c * size_of(zero), zero))


@kernel
def combine(top, lift, mass, zero):
    """The unit m of a row and the weight c of its features in it, by the rule of `blocks.combine`."""
    least, most, smallest = LIMITS[0] if size_of(zero) == 4 else LIMITS[1]
    unit = top
    if mass != zero:
        unit = max(top, number(math.log(abs(mass)), zero) + lift)
    else:
        most = MASSLESS
    c = number(math.exp(min(max(lift - unit, number(least, zero)), number(most, zero))), zero)
    return unit, c if c > number(smallest, zero) else zero


@kernel
def row_edges(o, lane, block, s):
    """Of the row in slot s: its number in the piece, its place on the timeline, and how many sinks it reads."""
    i = block.first + s - block.slot
    if i < lane.new_sinks:
        return i, -1, lane.old_sinks + i + 1
    return i, lane.kept + i - lane.new_sinks, lane.old_sinks + lane.new_sinks


@kernel
def mask_logits(o, lane, block, weights, a, sinks, zero):
    """-inf where a key is not near the row; the largest logit of those that are."""
    n, hidden = lanes_of(zero), splat(number(-math.inf, zero))
    best = hidden
    empty = o.sink_tiles * n - lane.old_sinks - lane.new_sinks
    for t in range(o.sink_tiles):
        x = between(load(weights + t * BYTES, zero), empty - t * n, empty + sinks - t * n, hidden)
        store(weights + t * BYTES, x)
        best = larger(x, best)
    for slot in range(o.band):
        u, at = block.tile - (block.tile - slot) % o.band, weights + (o.sink_tiles + slot) * BYTES
        x = between(load(at, zero), a - o.window + 1 - u * n, a + 1 - u * n, hidden) if u >= 0 else hidden
        store(at, x)
        best = larger(x, best)
    return largest(best)


@kernel
def mask_scores(o, scores, first, tiles, a, zero):
    """Zero where a key is not far from the row; the sum of the others."""
    n, none = lanes_of(zero), splat(zero)
    sums = none
    for t in range(tiles):
        x = between(load(scores + t * BYTES, zero), 0, a - o.window + 1 - (first + t) * n, none)
        store(scores + t * BYTES, x)
        sums = plus(sums, x)
    return total(sums)


@kernel
def weigh_near(weights, columns, unit, zero):
    """exp(logit - m) in place, and the sum."""
    shift, sums = splat(-unit), splat(zero)
    for c in range(0, columns * BYTES, BYTES):
        x = exp(plus(load(weights + c, zero), shift))
        store(weights + c, x)
        sums = plus(sums, x)
    return total(sums)


@called_kernel
def load_queries(x, o, lane, block, head, room, scratch, zero):
    """The rows of a block; zeros in other slots."""
    n, size = lanes_of(zero), size_of(zero)
    kp, fp = padded(x.q.width, size), padded(x.fq.width, size)
    for s in range(n):
        query, fq = scratch + room.queries + s * kp, scratch + room.fq + s * fp
        if block.slot <= s < block.slot + block.count:
            at = token(x, lane.b, block.first + s - block.slot)
            load_row(query, x.q, lane.b, head, at, zero)
            scale_row(query, number(o.scale, zero), query, kp, zero)
            if o.far:
                load_row(fq, x.fq, lane.b, head, at, zero)
        else:
            clear(query, kp, zero)
            clear(fq, fp, zero)


@kernel
def finish_row(x, o, near, lane, block, head, first, tiles, s, stats, room, scratch, zero):
    """From logits and scores to weights that sum to one."""
    size = size_of(zero)
    fp, columns = padded(x.fq.width, size), o.sink_tiles + o.band
    wp = columns * BYTES + fp
    weights, fq, scores = (
        scratch + room.weights + s * wp,
        scratch + room.fq + s * fp,
        scratch + room.scores + s * 2 * BYTES,
    )
    i, a, sinks = row_edges(o, lane, block, s)
    at = token(x, lane.b, i)
    if not o.given:
        top = mask_logits(o, lane, block, weights, a, sinks, zero)
    else:
        top = get(row(near.top, lane.b, head, at), zero)
    mass = zero
    if o.far:
        mass = dot(fq, scratch + room.z, fp, zero) + mask_scores(o, scores, first, tiles, a, zero)
    gain = get(row(x.gain, lane.b, head, at), zero)
    unit, c = combine(top, gain + top if o.relative else gain, mass, zero)
    if not o.given:
        share = weigh_near(weights, columns, unit, zero)
    else:
        clear(weights, columns * BYTES, zero)
        least = number(LIMITS[0][0] if size == 4 else LIMITS[1][0], zero)
        share = number(math.exp(max(get(row(near.log_mass, lane.b, head, at), zero) - unit, least)), zero)
    norm = share + mass * c
    factor = number(1, zero) / safe(norm, zero)
    put(row(stats.unit, lane.b, head, at), unit)
    put(row(stats.norm, lane.b, head, at), norm)
    put(row(stats.coefficient, lane.b, head, at), c)
    if not o.given:
        scale_row(weights, factor, weights, columns * BYTES, zero)
    if o.far:
        lift = splat(c * factor)
        for t in range(tiles):
            place = weights + (o.sink_tiles + (first + t) % o.band) * BYTES
            store(place, fma(lift, load(scores + t * BYTES, zero), load(place, zero)))
        scale_row(weights + columns * BYTES, c * factor, fq, fp, zero)
    return share * factor


@kernel
def add_weighted(scratch, room, first, count, n, vp, wp, zero):
    """The rows of a block, from `count` columns of weights on."""
    weights, values = scratch + room.weights + first * size_of(zero), scratch + room.values + first * vp
    multiply_matrices(scratch + room.rows, vp, n, vp, weights, wp, size_of(zero), values, vp, count, True, zero)


@called_kernel
def forward_block(x, o, near, to, stats, lane, block, first, tiles, room, scratch, zero):
    """All heads that share these keys."""
    n, size = lanes_of(zero), size_of(zero)
    kp, vp, fp = padded(x.q.width, size), padded(x.v.width, size), padded(x.fq.width, size)
    columns = o.sink_tiles + o.band
    wp = columns * BYTES + fp
    group = x.q.heads // x.k.heads
    empty = o.sink_tiles * n - lane.old_sinks - lane.new_sinks  # columns before the first sink
    count = columns * n - empty + (x.fq.width if o.far else 0)
    for head in range(lane.kv * group, (lane.kv + 1) * group):
        load_queries(x, o, lane, block, head, room, scratch, zero)
        if not o.given:
            q, keys = scratch + room.queries, scratch + room.keys_t
            by_key = columns * BYTES
            multiply_matrices(scratch + room.weights, wp, n, by_key, q, kp, size, keys, by_key, x.q.width, False, zero)
        if tiles > 0:
            fq, fk_t = scratch + room.fq, scratch + room.fk_t
            scores = scratch + room.scores
            multiply_matrices(
                scores, 2 * BYTES, n, tiles * BYTES, fq, fp, size, fk_t, 2 * BYTES, x.fq.width, False, zero
            )
        for s in range(block.slot, block.slot + block.count):
            share = finish_row(x, o, near, lane, block, head, first, tiles, s, stats, room, scratch, zero)
            put(scratch + room.tile + s * size, share)
        clear(scratch + room.rows, n * vp, zero)
        if o.given:
            for t in range(tiles):
                tile = o.sink_tiles + (first + t) % o.band
                add_weighted(scratch, room, tile * n, n, n, vp, wp, zero)
            add_weighted(scratch, room, columns * n, x.fq.width, n, vp, wp, zero)
        else:
            add_weighted(scratch, room, empty, count, n, vp, wp, zero)
        for s in range(block.slot, block.slot + block.count):
            at = token(x, lane.b, block.first + s - block.slot)
            set_row(to.out, lane.b, head, at, scratch + room.rows + s * vp, number(1, zero), zero)
            if o.given:
                load_row(scratch + room.rows + s * vp, near.out, lane.b, head, at, zero)
                share = get(scratch + room.tile + s * size, zero)
                add_to_row(to.out, lane.b, head, at, scratch + room.rows + s * vp, share, zero)


@kernel
def forward(x, o, near, to, stats, room, zero, scratch, first_lane, last_lane):
    """Lanes first <= b * h_kv < last."""
    n, size = lanes_of(zero), size_of(zero)
    fp = padded(x.fk.width, size)
    for index in range(first_lane, last_lane):
        lane = find_lane(x, o, index)
        clear_fields(scratch, room, zero)
        load_sinks(x, o, lane, room, scratch, zero)
        load_sums(x, o, lane, room, scratch, zero)
        for i in range(0, lane.new_sinks, n):
            none = n - n  # an integer of no particular value: one that is known would compile all of this once more
            block = Block(none - 1, none, i, min(n, lane.new_sinks - i))
            forward_block(x, o, near, to, stats, lane, block, none, none, room, scratch, zero)
        start = lane.kept // n
        for u in range(start - o.band + 1, start):
            load_band_tile(x, o, lane, room, scratch, u, zero)
        for j in range(start, -(-lane.total // n) if lane.total > lane.kept else 0):
            load_band_tile(x, o, lane, room, scratch, j, zero)
            first, tiles = far_tiles(o, j, zero)
            if tiles > 0:
                load_features(x, o, lane, room, scratch, first, tiles, zero)
            a = max(j * n, lane.kept)
            block = Block(j, a - j * n, a - lane.kept + lane.new_sinks, min(j * n + n, lane.total) - a)
            forward_block(x, o, near, to, stats, lane, block, first, tiles, room, scratch, zero)
            if o.far:
                for t in range(tiles):
                    # The first tile leaves the band; at the end, all that has left the window.
                    left = n * (1 - t) if (j + 1) * n < lane.total else lane.total - o.window - (first + t) * n
                    if left > 0 and first + t >= 0:
                        absorb(x, o, room, scratch, first + t, scratch + room.fk + t * n * fp, min(left, n), zero)
        store_sums(x, o, to, lane, room, scratch, zero)
