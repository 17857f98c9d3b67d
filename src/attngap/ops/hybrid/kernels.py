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

from attngap.ops.hybrid.kernels_band import absorb, load_band_tile, load_features, load_sinks, load_sums, store_sums
from attngap.ops.hybrid.kernels_layout import (
    Block,
    all_skipped,
    block_of,
    far_tiles,
    find_lane,
    is_skipped,
    lanes_of,
    part_of,
    token,
)
from attngap.ops.hybrid.kernels_rows import add_to_row, clear, load_row, scale_row, set_row
from attngap.ops.hybrid.kernels_tile import compute_features, load_fading, load_parameters, query_features
from attngap.ops.hybrid.kernels_weights import finish_row
from attngap.ops.native.memory import clear_fields, padded, row
from attngap.ops.native.products import multiply_matrices
from attngap.ops.native.vectors import BYTES, called_kernel, get, kernel, number, put, size_of


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
            if x.table == 0:
                put(scratch + room.gains + s * size, get(row(x.gain, lane.b, head, at), zero))
                if o.far:
                    load_row(fq, x.fq, lane.b, head, at, zero)
        else:
            clear(query, kp, zero)
            clear(fq, fp, zero)
    if x.table != 0:
        query_features(x, lane, block, head, room, scratch, zero)


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
    if x.table != 0:
        load_fading(x, lane, block, room, scratch, zero)
    for head in range(lane.kv * group, (lane.kv + 1) * group):
        if is_skipped(x, head):
            continue
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


@called_kernel
def far_features(x, o, lane, room, scratch, u, tiles, zero):
    """Of the tiles from u on, and their transpose."""
    if x.table == 0:
        load_features(x, o, lane, room, scratch, u, tiles, zero)
    else:
        compute_features(x, o, lane, room, scratch, u, tiles, zero)


@called_kernel
def catch_up(x, o, lane, room, scratch, start, first, zero):
    """S and z take in what has left the band before block `first`, as the blocks from `start` on would have done."""
    if not o.far:
        return
    for u in range(max(0, start - o.band + 1), first - o.band + 1):
        load_band_tile(x, o, lane, room, scratch, u, zero)
        far_features(x, o, lane, room, scratch, u, 1, zero)
        absorb(x, o, room, scratch, u, scratch + room.fk, lanes_of(zero), zero)


@kernel
def forward(x, o, near, to, stats, room, zero, scratch, first_part, last_part):
    """Parts first <= index < last: the lanes b * h_kv, then their second parts, and so on."""
    n, size = lanes_of(zero), size_of(zero)
    fp, lanes = padded(x.fk.width, size), x.k.batch * x.k.heads
    for index in range(first_part, last_part):
        lane, part = find_lane(x, o, index % lanes), index // lanes
        clear_fields(scratch, room, zero)
        load_sums(x, o, lane, room, scratch, zero)
        if all_skipped(x, lane):
            store_sums(x, o, to, lane, room, scratch, zero)
            continue
        load_sinks(x, o, lane, room, scratch, zero)
        if x.table != 0:
            load_parameters(x, lane, room, scratch, zero)
        for i in range(0, lane.new_sinks if part == 0 else 0, n):
            none = n - n  # an integer of no particular value: one that is known would compile all of this once more
            block = Block(none - 1, none, i, min(n, lane.new_sinks - i))
            forward_block(x, o, near, to, stats, lane, block, none, none, room, scratch, zero)
        begin, end, start = part_of(lane, part, o.parts, n)
        catch_up(x, o, lane, room, scratch, start, begin, zero)
        for u in range(begin - o.band + 1, begin):
            load_band_tile(x, o, lane, room, scratch, u, zero)
        for j in range(begin, end):
            load_band_tile(x, o, lane, room, scratch, j, zero)
            first, tiles = far_tiles(o, j, zero)
            if tiles > 0:
                far_features(x, o, lane, room, scratch, first, tiles, zero)
            forward_block(x, o, near, to, stats, lane, block_of(lane, j, n), first, tiles, room, scratch, zero)
            if o.far:
                for t in range(tiles):
                    # The first tile leaves the band; at the end, all that has left the window.
                    left = n * (1 - t) if (j + 1) * n < lane.total else lane.total - o.window - (first + t) * n
                    if left > 0 and first + t >= 0:
                        absorb(x, o, room, scratch, first + t, scratch + room.fk + t * n * fp, min(left, n), zero)
        if part == o.parts - 1:
            store_sums(x, o, to, lane, room, scratch, zero)


@called_kernel
def keep_key(x, o, lane, slot, i, buffer, zero):
    """Key and value of real token i of the piece, in a slot of the state."""
    at = token(x, lane.b, i)
    load_row(buffer, x.k, lane.b, lane.kv, at, zero)
    set_row(x.past_k, lane.b, lane.kv, slot, buffer, number(1, zero), zero)
    load_row(buffer, x.v, lane.b, lane.kv, at, zero)
    set_row(x.past_v, lane.b, lane.kv, slot, buffer, number(1, zero), zero)


@kernel
def keep(x, o, room, zero, scratch, first_lane, last_lane):
    """The rings of the state take in the piece, after all rows were computed from what they held before."""
    n, fp = lanes_of(zero), padded(x.fk.width, size_of(zero))
    for index in range(first_lane, last_lane):
        lane = find_lane(x, o, index)
        if all_skipped(x, lane):
            continue
        clear_fields(scratch, room, zero)
        load_parameters(x, lane, room, scratch, zero)
        for i in range(lane.new_sinks):
            keep_key(x, o, lane, lane.old_sinks + i, i, scratch + room.rows, zero)
        oldest = max(lane.kept, lane.total - o.window)
        for u in range(oldest // n, -(-lane.total // n)):
            compute_features(x, o, lane, room, scratch, u, 1, zero)
            for a in range(max(oldest, u * n), min(lane.total, u * n + n)):
                slot, feature = (lane.oldest + a) % o.window, scratch + room.fk + (a - u * n) * fp
                keep_key(x, o, lane, o.sinks + slot, a - lane.kept + lane.new_sinks, scratch + room.rows, zero)
                set_row(x.past_fk, lane.b, lane.kv, slot, feature, number(1, zero), zero)
