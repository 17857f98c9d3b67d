"""Sinks, band and sums of a lane in scratch memory: filled from tensors, and moved on as tiles leave the band."""

from attngap.ops.hybrid.kernels_layout import lanes_of, token
from attngap.ops.hybrid.kernels_rows import clear, load_row, set_row
from attngap.ops.native.memory import padded, row
from attngap.ops.native.products import ROWS, multiply_matrices
from attngap.ops.native.vectors import (
    BYTES,
    called_kernel,
    get,
    load,
    number,
    plus,
    put,
    size_of,
    store,
    transpose,
)


@called_kernel
def load_past_or_new(buffer, past, new, skip, x, o, lane, a, zero):
    """Token a of the timeline; the ring of `past` begins after `skip` slots."""
    if a < lane.kept:
        load_row(buffer, past, lane.b, lane.kv, skip + (lane.oldest + a) % o.window, zero)
    else:
        load_row(buffer, new, lane.b, lane.kv, token(x, lane.b, a - lane.kept + lane.new_sinks), zero)


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
