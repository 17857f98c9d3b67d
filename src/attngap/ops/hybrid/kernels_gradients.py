"""What the backward of hybrid attention holds of a lane: rows, tiles and their gradients, loaded and put away."""

from typing import NamedTuple

from attngap.ops.hybrid.kernels_band import load_past_or_new, transpose_tile
from attngap.ops.hybrid.kernels_layout import token
from attngap.ops.hybrid.kernels_rows import add_to_row, clear, dot, load_row, scale_row
from attngap.ops.native.memory import padded, row, safe
from attngap.ops.native.tensors import Rows
from attngap.ops.native.vectors import BYTES, called_kernel, get, kernel, number, put, size_of
from attngap.ops.normalizer import EPS


class Above(NamedTuple):
    """The results, what was kept of each row, and the gradients of the results."""

    out: Rows
    unit: Rows  # (b, h, t, 1), and so the next two
    norm: Rows
    coefficient: Rows
    d_out: Rows
    S: Rows
    z: Rows


class HybridGradRows(NamedTuple):
    q: Rows
    k: Rows
    v: Rows
    fq: Rows
    fk: Rows
    gain: Rows
    past_k: Rows
    past_v: Rows
    past_fk: Rows
    S: Rows
    z: Rows


class Room(NamedTuple):
    """Offsets of the fields of scratch memory; sizes are in `compiled.backward_room`."""

    keys: int  # rows of keys and values, sinks and band, and of their gradients
    values: int
    d_keys: int
    d_values: int
    keys_t: int
    values_t: int
    weights: int
    d_weights: int
    queries: int
    fq: int
    grads: int  # g
    fk: int
    fk_t: int
    d_fk: int
    scores: int
    d_scores: int
    rows: int  # a result of a block
    S_t: int
    z: int
    dS: int
    dS_t: int
    dz: int
    mean: int  # D of each slot, and so the next two
    coefficient: int
    unit: int
    end: int
    guard: int


class Pitches(NamedTuple):
    """Bytes of a row of keys, values, features and weights; and numbers in a vector."""

    k: int
    v: int
    f: int
    w: int
    n: int
    size: int


@kernel
def pitches(x, o, zero):
    size = size_of(zero)
    return Pitches(
        padded(x.k.width, size),
        padded(x.v.width, size),
        padded(x.fk.width, size),
        (o.sink_tiles + o.band) * BYTES,
        BYTES // size,
        size,
    )


@kernel
def load_key(x, o, lane, room, scratch, p, column, i, a, zero):
    """Key and value of sink i or, if that is negative, of token a of the timeline; zeros where neither is."""
    key, value = scratch + room.keys + column * p.k, scratch + room.values + column * p.v
    if i >= lane.old_sinks:
        at = token(x, lane.b, i - lane.old_sinks)
        load_row(key, x.k, lane.b, lane.kv, at, zero)
        load_row(value, x.v, lane.b, lane.kv, at, zero)
    elif i >= 0:
        load_row(key, x.past_k, lane.b, lane.kv, i, zero)
        load_row(value, x.past_v, lane.b, lane.kv, i, zero)
    elif 0 <= a < lane.total:
        load_past_or_new(key, x.past_k, x.k, o.sinks, x, o, lane, a, zero)
        load_past_or_new(value, x.past_v, x.v, o.sinks, x, o, lane, a, zero)
    else:
        clear(key, p.k, zero)
        clear(value, p.v, zero)


@called_kernel
def load_tile(x, o, lane, room, scratch, p, tile, u, zero):
    """A tile of columns: of sinks if tile < sink_tiles, else tile u of the timeline; the gradients start anew."""
    empty = o.sink_tiles * p.n - lane.old_sinks - lane.new_sinks
    for j in range(p.n):
        column = tile * p.n + j
        i, a = (column - empty, -1) if tile < o.sink_tiles else (-1, u * p.n + j)
        load_key(x, o, lane, room, scratch, p, column, i, a, zero)
    clear(scratch + room.d_keys + tile * p.n * p.k, p.n * p.k, zero)
    clear(scratch + room.d_values + tile * p.n * p.v, p.n * p.v, zero)
    transpose_tile(scratch + room.keys_t + tile * BYTES, p.w, scratch + room.keys + tile * p.n * p.k, p.k, zero)
    transpose_tile(scratch + room.values_t + tile * BYTES, p.w, scratch + room.values + tile * p.n * p.v, p.v, zero)


@called_kernel
def add_row(past, new, skip, x, o, lane, a, buffer, zero):
    """To the gradient of token a of the timeline, wherever it is."""
    one = number(1, zero)
    if a < lane.kept:
        add_to_row(past, lane.b, lane.kv, skip + (lane.oldest + a) % o.window, buffer, one, zero)
    else:
        at = token(x, lane.b, a - lane.kept + lane.new_sinks)
        add_to_row(new, lane.b, lane.kv, at, buffer, one, zero)


@called_kernel
def store_tile(x, o, to, lane, room, scratch, p, u, zero):
    """The gradients of tile u of the timeline, when it leaves the band."""
    column = (o.sink_tiles + u % o.band) * p.n
    for j in range(p.n):
        a = u * p.n + j
        if 0 <= a < lane.total:
            add_row(to.past_k, to.k, o.sinks, x, o, lane, a, scratch + room.d_keys + (column + j) * p.k, zero)
            add_row(to.past_v, to.v, o.sinks, x, o, lane, a, scratch + room.d_values + (column + j) * p.v, zero)


@called_kernel
def store_sinks(x, o, to, lane, room, scratch, p, zero):
    one = number(1, zero)
    empty = o.sink_tiles * p.n - lane.old_sinks - lane.new_sinks
    for i in range(lane.old_sinks + lane.new_sinks):
        d_key, d_value = scratch + room.d_keys + (empty + i) * p.k, scratch + room.d_values + (empty + i) * p.v
        if i < lane.old_sinks:
            add_to_row(to.past_k, lane.b, lane.kv, i, d_key, one, zero)
            add_to_row(to.past_v, lane.b, lane.kv, i, d_value, one, zero)
        else:
            at = token(x, lane.b, i - lane.old_sinks)
            add_to_row(to.k, lane.b, lane.kv, at, d_key, one, zero)
            add_to_row(to.v, lane.b, lane.kv, at, d_value, one, zero)


@called_kernel
def load_rows(x, o, above, lane, block, head, room, scratch, p, zero):
    """Queries, features and g of a block with D, c and m; zeros in slots that have no row."""
    for s in range(p.n):
        query, fq, g = scratch + room.queries + s * p.k, scratch + room.fq + s * p.f, scratch + room.grads + s * p.v
        mean, c, unit, place = zero, zero, zero, s * p.size
        if block.slot <= s < block.slot + block.count:
            at = token(x, lane.b, block.first + s - block.slot)
            load_row(query, x.q, lane.b, head, at, zero)
            scale_row(query, number(o.scale, zero), query, p.k, zero)
            load_row(fq, x.fq, lane.b, head, at, zero)
            load_row(g, above.d_out, lane.b, head, at, zero)
            load_row(scratch + room.rows, above.out, lane.b, head, at, zero)
            norm = get(row(above.norm, lane.b, head, at), zero)
            scale_row(g, number(1, zero) / safe(norm, zero), g, p.v, zero)
            # The gradient does not pass through a normalizer that was replaced.
            mean = zero if abs(norm) < number(EPS, zero) else dot(g, scratch + room.rows, p.v, zero)
            c = get(row(above.coefficient, lane.b, head, at), zero)
            unit = get(row(above.unit, lane.b, head, at), zero)
        else:
            clear(query, p.k, zero)
            clear(fq, p.f, zero)
            clear(g, p.v, zero)
        put(scratch + room.mean + place, mean)
        put(scratch + room.coefficient + place, c)
        put(scratch + room.unit + place, unit)
