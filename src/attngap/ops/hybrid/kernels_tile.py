"""The far features of a tile of tokens, compiled: turned back by their positions, then prototypes that fade.

The same as `kernels_features` for one token: a tile is turned, and one product of matrices gives the features of all of
its rows. Parameters are copied once for a lane, filled up with what gives features of zero. The table of `kernels_call`
says what there is.
"""

import math

from attngap.ops.hybrid.kernels_band import transpose_tile
from attngap.ops.hybrid.kernels_call import AT, IN, WORD, tensor, there, value, word
from attngap.ops.hybrid.kernels_features import exponentials
from attngap.ops.hybrid.kernels_layout import lanes_of, token
from attngap.ops.hybrid.kernels_rotary import invert_angles, turn_pairs
from attngap.ops.hybrid.kernels_rows import clear, dot, load_row
from attngap.ops.native.memory import padded, row
from attngap.ops.native.products import multiply_matrices
from attngap.ops.native.vectors import (
    BYTES,
    called_kernel,
    exp,
    fma,
    get,
    kernel,
    larger,
    load,
    number,
    over,
    plus,
    put,
    size_of,
    smaller,
    splat,
    store,
    times,
)


@kernel
def load_bias(to, x, head, pitch, zero):
    """A row of parameters, and -inf behind it."""
    hidden = splat(number(-math.inf, zero))
    for c in range(0, pitch, BYTES):
        store(to + c, hidden)
    load_row(to, x, 0, head, 0, zero)


@called_kernel
def load_parameters(x, lane, room, scratch, zero):
    """What the features of a lane's heads are computed from; the fields were cleared before."""
    table, size, group = x.table, size_of(zero), x.q.heads // x.k.heads
    kp, fp, d = padded(x.q.width, size), padded(x.fq.width, size), x.q.width
    most = value(table, IN.largest_scale, zero)
    for i in range(d):
        load_row(scratch + room.key_weight + i * fp, tensor(table, AT.key_weight), 0, lane.kv, i, zero)
    load_bias(scratch + room.key_bias, tensor(table, AT.key_bias), lane.kv, fp, zero)
    for h in range(group):
        head = lane.kv * group + h
        for i in range(d):
            load_row(scratch + room.query_weight + (h * d + i) * fp, tensor(table, AT.query_weight), 0, head, i, zero)
        load_bias(scratch + room.query_bias + h * fp, tensor(table, AT.query_bias), head, fp, zero)
        scale = scratch + room.query_scale + h * fp
        load_row(scale, tensor(table, AT.query_scale), 0, head, 0, zero)
        for c in range(0, fp, BYTES):
            lift = larger(splat(-most), smaller(load(scale + c, zero), splat(most)))  # keeps what is not a number
            store(scale + c, exp(lift))
        if there(table, AT.gain_weight):
            load_row(scratch + room.gain_weight + h * kp, tensor(table, AT.gain_weight), 0, head, 0, zero)
    if there(table, AT.log_rate):
        load_row(scratch + room.rate, tensor(table, AT.log_rate), 0, lane.kv, 0, zero)
        fastest = splat(value(table, IN.fastest, zero))
        for c in range(0, fp, BYTES):
            store(scratch + room.rate + c, smaller(exp(load(scratch + room.rate + c, zero)), fastest))


@kernel
def in_vectors(table, x, zero):
    """Do the angles and the channels they turn lie in whole vectors."""
    aligned = word(table, IN.turned) * size_of(zero) % BYTES == 0 and not word(table, IN.adjacent)
    return aligned and word(table, IN.angle_step) == 1 and x.by_column == size_of(zero)


@called_kernel
def load_angles(x, b, first, slot, count, room, scratch, zero):
    """cos and minus sin of every pair of channels, over the square of their length, for `count` tokens from `first`."""
    table, size, kp = x.table, size_of(zero), padded(x.q.width, size_of(zero))
    cos, sin, pairs = tensor(table, AT.cos), tensor(table, AT.sin), word(table, IN.turned)
    vectors, none = in_vectors(table, cos, zero) and in_vectors(table, sin, zero), splat(zero)
    for s in range(slot, slot + count):
        at = token(x, b, first + s - slot)
        from_c, from_s = row(cos, b, 0, at), row(sin, b, 0, at)
        to_c, to_s = scratch + room.cosines + s * kp, scratch + room.sines + s * kp
        if vectors:
            for c in range(0, pairs * size, BYTES):
                x_c, x_s = load(from_c + c, zero), load(from_s + c, zero)
                length = fma(x_c, x_c, times(x_s, x_s))
                store(to_c + c, over(x_c, length))
                store(to_s + c, over(fma(splat(number(-1, zero)), x_s, none), length))
        else:
            invert_angles(table, b, at, to_c, to_s, zero)


@called_kernel
def turn_back(source, x, b, head, first, slot, count, room, scratch, zero):
    """`count` queries or keys from token `first` on, into the slots of `content`, by the angles of the same slots."""
    table, size, kp = x.table, size_of(zero), padded(x.q.width, size_of(zero))
    pairs = word(table, IN.turned)
    vectors, back = in_vectors(table, source, zero), splat(number(-1, zero))
    for s in range(slot, slot + count):
        content = scratch + room.content + s * kp
        load_row(content, source, b, head, token(x, b, first + s - slot), zero)
        start = content + word(table, IN.turned_first) * size
        cosines, sines = scratch + room.cosines + s * kp, scratch + room.sines + s * kp
        if vectors:
            for c in range(0, pairs * size, BYTES):
                one, two = load(start + c, zero), load(start + pairs * size + c, zero)
                x_c, x_s = load(cosines + c, zero), load(sines + c, zero)
                store(start + c, fma(one, x_c, times(back, times(two, x_s))))
                store(start + pairs * size + c, fma(two, x_c, times(one, x_s)))
        else:
            turn_pairs(table, content, cosines, sines, zero)


@kernel
def position_of(x, b, i):
    """Of real token i of the piece, as features see it."""
    return get(word(x.table, IN.position) + 8 * b, WORD) + i


@called_kernel
def load_fading(x, lane, block, room, scratch, zero):
    """What is left of each feature at the positions of a block of rows, and the angles of these positions."""
    fp, faded = padded(x.fq.width, size_of(zero)), splat(value(x.table, IN.faded, zero))
    back = splat(number(-1, zero))
    load_angles(x, lane.b, block.first, block.slot, block.count, room, scratch, zero)
    for s in range(block.slot, block.slot + block.count):
        position = splat(number(position_of(x, lane.b, block.first + s - block.slot), zero))
        for c in range(0, fp, BYTES):
            fading = smaller(times(load(scratch + room.rate + c, zero), position), faded)
            store(scratch + room.fading + s * fp + c, exp(times(back, fading)))


@called_kernel
def query_features(x, lane, block, head, room, scratch, zero):
    """exp(c - fading) softmax(q A + a) of a block of rows into `fq`, and their gains."""
    size, n = size_of(zero), lanes_of(zero)
    kp, fp, d = padded(x.q.width, size), padded(x.fq.width, size), x.q.width
    h = head - lane.kv * (x.q.heads // x.k.heads)
    fq, content, weight = scratch + room.fq, scratch + room.content, scratch + room.query_weight + h * d * fp
    turn_back(x.q, x, lane.b, head, block.first, block.slot, block.count, room, scratch, zero)
    multiply_matrices(fq, fp, n, fp, content, kp, size, weight, fp, d, False, zero)
    bias, scale = scratch + room.query_bias + h * fp, scratch + room.query_scale + h * fp
    for s in range(block.slot, block.slot + block.count):
        out, fading = fq + s * fp, scratch + room.fading + s * fp
        share = splat(exponentials(out, bias, fp, zero))
        for c in range(0, fp, BYTES):
            lift = times(load(scale + c, zero), load(fading + c, zero))
            store(out + c, times(times(load(out + c, zero), share), lift))
        put(
            scratch + room.gains + s * size,
            gain_of(x, lane.b, head, h, block.first + s - block.slot, s, room, scratch, zero),
        )


@kernel
def gain_of(x, b, head, h, i, s, room, scratch, zero):
    """The log-gain of the query in slot s of `content`."""
    table, kp, gain = x.table, padded(x.q.width, size_of(zero)), zero
    if there(table, AT.log_gain):
        gain += get(row(tensor(table, AT.log_gain), 0, head, 0), zero)
    if there(table, AT.gain_weight):
        gain += dot(scratch + room.content + s * kp, scratch + room.gain_weight + h * kp, kp, zero)
    if position_of(x, b, i) >= word(table, IN.reach):
        gain = number(-math.inf, zero)
    return gain


@called_kernel
def key_features(x, lane, first, slot, count, room, scratch, tile, zero):
    """exp(k P + b + fading) of `count` keys from token `first` on, into the slots of a tile."""
    size, n = size_of(zero), lanes_of(zero)
    kp, fp, d = padded(x.k.width, size), padded(x.fk.width, size), x.k.width
    load_angles(x, lane.b, first, slot, count, room, scratch, zero)
    turn_back(x.k, x, lane.b, lane.kv, first, slot, count, room, scratch, zero)
    content, weight = scratch + room.content, scratch + room.key_weight
    multiply_matrices(tile, fp, n, fp, content, kp, size, weight, fp, d, False, zero)
    most, faded = splat(value(x.table, IN.largest_size, zero)), splat(value(x.table, IN.faded, zero))
    for s in range(slot, slot + count):
        position = splat(number(position_of(x, lane.b, first + s - slot), zero))
        for c in range(0, fp, BYTES):
            sized = smaller(plus(load(tile + s * fp + c, zero), load(scratch + room.key_bias + c, zero)), most)
            fading = smaller(times(load(scratch + room.rate + c, zero), position), faded)
            store(tile + s * fp + c, exp(plus(sized, fading)))


@called_kernel
def compute_features(x, o, lane, room, scratch, u, tiles, zero):
    """As `load_features`: those of earlier pieces are in the ring, those of this one are computed."""
    n, fp = lanes_of(zero), padded(x.fk.width, size_of(zero))
    for t in range(tiles):
        tile, start = scratch + room.fk + t * n * fp, (u + t) * n
        first, last = max(start, lane.kept), min(start + n, lane.total)
        if first < last:
            key_features(
                x, lane, first - lane.kept + lane.new_sinks, first - start, last - first, room, scratch, tile, zero
            )
        for j in range(n):
            a = start + j
            if 0 <= a < lane.kept:
                load_row(tile + j * fp, x.past_fk, lane.b, lane.kv, (lane.oldest + a) % o.window, zero)
            elif not first <= a < last:
                clear(tile + j * fp, fp, zero)
        transpose_tile(scratch + room.fk_t + t * BYTES, 2 * BYTES, tile, fp, zero)
