"""The gradients of hybrid attention, compiled: forward over the blocks with S, then backward with the gradient of S.

In the notation of `blocks`: with g = d_out / n and D = g . out, the gradient of a row's weight on a token with value v
is g . v - D, in the unit of the row. The first pass finds all that reaches a token inside the band; the second what
reaches it through S and z. Both go over tiles as `kernels` does. Gradients of keys and values gather in the slots of
their tiles and are added to the results when a tile leaves the band. All results start as zeros.
"""

from attngap.ops.hybrid.kernels_band import load_features, load_past_or_new
from attngap.ops.hybrid.kernels_gradients import add_row, load_rows, load_tile, pitches, store_sinks, store_tile
from attngap.ops.hybrid.kernels_layout import Block, far_tiles, find_lane, row_edges, token
from attngap.ops.hybrid.kernels_rows import add, clear, dot, scale_row, set_row
from attngap.ops.hybrid.kernels_weights import mask_logits, weigh_near
from attngap.ops.native.memory import clear_fields, row
from attngap.ops.native.products import ROWS, multiply_matrices
from attngap.ops.native.vectors import (
    BYTES,
    between,
    called_kernel,
    equal,
    get,
    kernel,
    load,
    number,
    plus,
    put,
    splat,
    store,
    times,
    total,
)


@kernel
def grads_of_scores(o, room, scratch, p, s, a, first, tiles, zero):
    """g . v - D where a key is far from the row, zero elsewhere; and the scores times c, in place."""
    c = splat(get(scratch + room.coefficient + s * p.size, zero))
    shift = splat(-get(scratch + room.mean + s * p.size, zero))
    for t in range(tiles):
        at, tile = s * 2 * BYTES + t * BYTES, (o.sink_tiles + (first + t) % o.band) * BYTES
        edge = a - o.window + 1 - (first + t) * p.n
        d = plus(load(scratch + room.d_weights + s * p.w + tile, zero), shift)
        store(scratch + room.d_scores + at, between(d, 0, edge, splat(zero)))
        scores = between(load(scratch + room.scores + at, zero), 0, edge, splat(zero))
        store(scratch + room.scores + at, times(c, scores))


@kernel
def grads_of_weights(o, lane, block, room, scratch, p, s, a, sinks, first, tiles, d_lift, zero):
    """From logits to weights P, from g . v to the gradients of the logits, in place; then P takes in the far ones."""
    weights, grads = scratch + room.weights + s * p.w, scratch + room.d_weights + s * p.w
    top = mask_logits(o, lane, block, weights, a, sinks, zero)
    share = zero
    if o.relative:  # the largest near logit also measures the features; equal ones share
        ties = splat(zero)
        for c in range(0, p.w, BYTES):
            ties = plus(ties, equal(load(weights + c, zero), splat(top)))
        share = d_lift / total(ties)
    unit, mean = get(scratch + room.unit + s * p.size, zero), get(scratch + room.mean + s * p.size, zero)
    if o.relative:
        for c in range(0, p.w, BYTES):
            store(scratch + room.rows + c, times(splat(share), equal(load(weights + c, zero), splat(top))))
    weigh_near(weights, o.sink_tiles + o.band, unit, zero)
    for c in range(0, p.w, BYTES):
        d = times(load(weights + c, zero), plus(load(grads + c, zero), splat(-mean)))
        store(grads + c, plus(d, load(scratch + room.rows + c, zero)) if o.relative else d)
    for t in range(tiles):
        place = weights + (o.sink_tiles + (first + t) % o.band) * BYTES
        store(place, plus(load(place, zero), load(scratch + room.scores + s * 2 * BYTES + t * BYTES, zero)))


@called_kernel
def band_of_head(x, o, above, to, lane, block, head, first, tiles, room, scratch, p, zero):
    """One block of rows of one head, in the first pass."""
    load_rows(x, o, above, lane, block, head, room, scratch, p, zero)
    g, fq, fk, dfq = scratch + room.grads, scratch + room.fq, scratch + room.fk, scratch + room.rows
    scores, d_scores = scratch + room.scores, scratch + room.d_scores
    d_weights, values_t = scratch + room.d_weights, scratch + room.values_t
    if o.given:  # only the far keys of the band count
        for t in range(tiles):
            c = (o.sink_tiles + (first + t) % o.band) * BYTES
            multiply_matrices(d_weights + c, p.w, p.n, BYTES, g, p.v, p.size, values_t + c, p.w, x.v.width, False, zero)
    else:
        multiply_matrices(d_weights, p.w, p.n, p.w, g, p.v, p.size, values_t, p.w, x.v.width, False, zero)
    if tiles > 0:
        wide, fk_t = tiles * BYTES, scratch + room.fk_t
        multiply_matrices(scores, 2 * BYTES, p.n, wide, fq, p.f, p.size, fk_t, 2 * BYTES, x.fq.width, False, zero)
    for s in range(p.n):
        _, a, _ = row_edges(o, lane, block, s)
        real = block.slot <= s < block.slot + block.count
        grads_of_scores(o, room, scratch, p, s, a if real else -1, first, tiles, zero)
    if o.far:
        multiply_matrices(dfq, p.f, p.n, p.f, g, p.v, p.size, scratch + room.S_t, p.f, x.v.width, False, zero)
        multiply_matrices(dfq, p.f, p.n, p.f, d_scores, 2 * BYTES, p.size, fk, p.f, tiles * p.n, True, zero)
    for s in range(block.slot, block.slot + block.count):
        at = token(x, lane.b, block.first + s - block.slot)
        d_lift = zero
        if o.far:
            c, mean = get(scratch + room.coefficient + s * p.size, zero), get(scratch + room.mean + s * p.size, zero)
            add(dfq + s * p.f, -mean, scratch + room.z, p.f, zero)
            set_row(to.fq, lane.b, head, at, dfq + s * p.f, c, zero)
            d_lift = c * dot(dfq + s * p.f, fq + s * p.f, p.f, zero)
            for t in range(tiles):
                place = d_scores + s * 2 * BYTES + t * BYTES
                store(place, times(splat(c), load(place, zero)))
        put(row(to.gain, lane.b, head, at), d_lift)
    if tiles > 0:
        d_fk = scratch + room.d_fk
        multiply_matrices(d_fk, p.f, tiles * p.n, p.f, d_scores, p.size, 2 * BYTES, fq, p.f, p.n, True, zero)
    if not o.given:
        near_of_head(x, o, to, lane, block, head, first, tiles, room, scratch, p, zero)


@called_kernel
def near_of_head(x, o, to, lane, block, head, first, tiles, room, scratch, p, zero):
    """The gradients of queries, keys and values through the weights of the band."""
    columns = (o.sink_tiles + o.band) * p.n
    q, g, rows = scratch + room.queries, scratch + room.grads, scratch + room.rows
    weights, d_weights = scratch + room.weights, scratch + room.d_weights
    multiply_matrices(weights, p.w, p.n, p.w, q, p.k, p.size, scratch + room.keys_t, p.w, x.q.width, False, zero)
    for s in range(p.n):
        if block.slot <= s < block.slot + block.count:
            i, a, sinks = row_edges(o, lane, block, s)
            d_lift = get(row(to.gain, lane.b, head, token(x, lane.b, i)), zero)
            grads_of_weights(o, lane, block, room, scratch, p, s, a, sinks, first, tiles, d_lift, zero)
        else:
            clear(weights + s * p.w, p.w, zero)
            clear(d_weights + s * p.w, p.w, zero)
    multiply_matrices(rows, p.k, p.n, p.k, d_weights, p.w, p.size, scratch + room.keys, p.k, columns, False, zero)
    for s in range(block.slot, block.slot + block.count):
        at = token(x, lane.b, block.first + s - block.slot)
        set_row(to.q, lane.b, head, at, rows + s * p.k, number(o.scale, zero), zero)
    multiply_matrices(scratch + room.d_keys, p.k, columns, p.k, d_weights, p.size, p.w, q, p.k, p.n, True, zero)
    multiply_matrices(scratch + room.d_values, p.v, columns, p.v, weights, p.size, p.w, g, p.v, p.n, True, zero)


@called_kernel
def band_pass(x, o, above, to, lane, room, scratch, p, zero):
    """Forward in time, S growing: every gradient but those that reach a token through S and z."""
    group, n = x.q.heads // x.k.heads, p.n
    none = n - n  # an integer of no particular value: one that is known would compile all of this once more
    for c in range(x.S.length):
        put(scratch + room.z + c * p.size, get(row(x.z, lane.b, lane.kv, c), zero))
        for e in range(x.S.width):
            place = row(x.S, lane.b, lane.kv, c) + e * x.S.by_column
            put(scratch + room.S_t + e * p.f + c * p.size, get(place, zero))
    for t in range(o.sink_tiles):
        load_tile(x, o, lane, room, scratch, p, t, none, zero)
    start, stop = lane.kept // n, -(-lane.total // n) if lane.total > lane.kept else 0
    for i in range(0, lane.new_sinks, n):
        block = Block(none - 1, none, i, min(n, lane.new_sinks - i))
        for head in range(lane.kv * group, (lane.kv + 1) * group):
            band_of_head(x, o, above, to, lane, block, head, none, none, room, scratch, p, zero)
    for u in range(start - o.band + 1, start):
        load_tile(x, o, lane, room, scratch, p, o.sink_tiles + u % o.band, u, zero)
    for j in range(start, stop):
        load_tile(x, o, lane, room, scratch, p, o.sink_tiles + j % o.band, j, zero)
        first, tiles = far_tiles(o, j, zero)
        load_features(x, o, lane, room, scratch, first, tiles, zero)
        clear(scratch + room.d_fk, 2 * n * p.f, zero)
        a = max(j * n, lane.kept)
        block = Block(j, a - j * n, a - lane.kept + lane.new_sinks, min(j * n + n, lane.total) - a)
        for head in range(lane.kv * group, (lane.kv + 1) * group):
            band_of_head(x, o, above, to, lane, block, head, first, tiles, room, scratch, p, zero)
        for i in range(tiles * n):
            a = first * n + i
            if 0 <= a < lane.total:
                add_row(to.past_fk, to.fk, 0, x, o, lane, a, scratch + room.d_fk + i * p.f, zero)
        if tiles > 0 and first >= 0 and j + 1 < stop:
            values = scratch + room.values + (o.sink_tiles + first % o.band) * n * p.v
            heights = -(-x.v.width // ROWS) * ROWS
            S_t, fk = scratch + room.S_t, scratch + room.fk
            multiply_matrices(S_t, p.f, heights, p.f, values, p.size, p.v, fk, p.f, n, True, zero)
            for i in range(n):
                add(scratch + room.z, number(1, zero), fk + i * p.f, p.f, zero)
        if not o.given and j + 1 < stop:
            store_tile(x, o, to, lane, room, scratch, p, first, zero)
    if not o.given:
        for u in range(stop - o.band, stop):
            store_tile(x, o, to, lane, room, scratch, p, u, zero)
        store_sinks(x, o, to, lane, room, scratch, p, zero)


@called_kernel
def rows_into_sums(x, o, above, lane, block, room, scratch, p, zero):
    """dS and dz take in the rows of a block: (c fq)^T g and -c D fq."""
    group = x.q.heads // x.k.heads
    tall, wide = -(-x.fq.width // ROWS) * ROWS, -(-x.v.width // ROWS) * ROWS
    fq, g = scratch + room.fq, scratch + room.grads
    for head in range(lane.kv * group, (lane.kv + 1) * group):
        load_rows(x, o, above, lane, block, head, room, scratch, p, zero)
        for s in range(p.n):
            c, mean = get(scratch + room.coefficient + s * p.size, zero), get(scratch + room.mean + s * p.size, zero)
            scale_row(fq + s * p.f, c, fq + s * p.f, p.f, zero)
            add(scratch + room.dz, -mean, fq + s * p.f, p.f, zero)
        multiply_matrices(scratch + room.dS, p.v, tall, p.v, fq, p.size, p.f, g, p.v, p.n, True, zero)
        multiply_matrices(scratch + room.dS_t, p.f, wide, p.f, g, p.size, p.v, fq, p.f, p.n, True, zero)


@called_kernel
def sums_into_tokens(x, o, to, lane, room, scratch, p, first, count, zero):
    """The gradients that tokens first <= a < first + count of the timeline get through S and z."""
    rows, fk, values = scratch + room.rows, scratch + room.fk, scratch + room.grads
    for i in range(p.n):
        if i < count:
            load_past_or_new(fk + i * p.f, x.past_fk, x.fk, 0, x, o, lane, first + i, zero)
            load_past_or_new(values + i * p.v, x.past_v, x.v, o.sinks, x, o, lane, first + i, zero)
        else:
            clear(fk + i * p.f, p.f, zero)
            clear(values + i * p.v, p.v, zero)
    multiply_matrices(rows, p.f, p.n, p.f, values, p.v, p.size, scratch + room.dS_t, p.f, x.v.width, False, zero)
    for i in range(count):
        add(rows + i * p.f, number(1, zero), scratch + room.dz, p.f, zero)
        add_row(to.past_fk, to.fk, 0, x, o, lane, first + i, rows + i * p.f, zero)
    if not o.given:
        multiply_matrices(rows, p.v, p.n, p.v, fk, p.f, p.size, scratch + room.dS, p.v, x.fk.width, False, zero)
        for i in range(count):
            add_row(to.past_v, to.v, o.sinks, x, o, lane, first + i, rows + i * p.v, zero)


@called_kernel
def state_pass(x, o, above, to, lane, room, scratch, p, zero):
    """Backward in time, dS growing: what reaches a token through S and z."""
    n = p.n
    for c in range(x.S.length):
        put(scratch + room.dz + c * p.size, get(row(above.z, lane.b, lane.kv, c), zero))
        for e in range(x.S.width):
            d = get(row(above.S, lane.b, lane.kv, c) + e * above.S.by_column, zero)
            put(scratch + room.dS + c * p.v + e * p.size, d)
            put(scratch + room.dS_t + e * p.f + c * p.size, d)
    start, stop = lane.kept // n, -(-lane.total // n) if lane.total > lane.kept else 0
    for j in range(stop - 1, start - 1, -1):
        first, tiles = far_tiles(o, j, zero)
        for t in range(tiles):
            left = n * (1 - t) if j + 1 < stop else lane.total - o.window - (first + t) * n
            if left > 0 and first + t >= 0:
                sums_into_tokens(x, o, to, lane, room, scratch, p, (first + t) * n, min(left, n), zero)
        a = max(j * n, lane.kept)
        block = Block(j, a - j * n, a - lane.kept + lane.new_sinks, min(j * n + n, lane.total) - a)
        rows_into_sums(x, o, above, lane, block, room, scratch, p, zero)
    for i in range(0, lane.new_sinks, n):
        block = Block(n - n - 1, n - n, i, min(n, lane.new_sinks - i))
        rows_into_sums(x, o, above, lane, block, room, scratch, p, zero)
    for c in range(x.S.length):
        put(row(to.z, lane.b, lane.kv, c), get(scratch + room.dz + c * p.size, zero))
        set_row(to.S, lane.b, lane.kv, c, scratch + room.dS + c * p.v, number(1, zero), zero)


@kernel
def backward(x, o, above, to, room, zero, scratch, first_lane, last_lane):
    """Lanes first <= b * h_kv < last. What one lane leaves in scratch memory, infinite or not, the next never sees."""
    p = pitches(x, o, zero)
    for index in range(first_lane, last_lane):
        lane = find_lane(x, o, index)
        clear_fields(scratch, room, zero)
        band_pass(x, o, above, to, lane, room, scratch, p, zero)
        if o.far:
            state_pass(x, o, above, to, lane, room, scratch, p, zero)
