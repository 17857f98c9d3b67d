"""The far features of one token, compiled: turned back by its position, then prototypes that fade.

The same as `mechanisms.rotary.Rotary.unrotate` and `mechanisms.feature_maps.Prototype`, row by row.
"""

import math

from attngap.ops.hybrid.kernels_call import AT, IN, ROOM, WORD, field, tensor, there, value, width, word
from attngap.ops.hybrid.kernels_rotary import invert, invert_angles, turn_pairs
from attngap.ops.hybrid.kernels_rows import clear, dot, load_row
from attngap.ops.native.memory import padded, row
from attngap.ops.native.vectors import (
    BYTES,
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
    smaller,
    splat,
    store,
    times,
    total,
)


@called_kernel
def load_angles(table, scratch, b, zero):
    """What turns the token's queries and keys back."""
    invert_angles(table, b, 0, field(table, scratch, ROOM.cosines), field(table, scratch, ROOM.sines), zero)


@called_kernel
def load_old_angles(table, scratch, b, token, zero):
    """What turns the key of an earlier token back, one of the last `window`."""
    if there(table, AT.state_cos):
        cosines, sines = field(table, scratch, ROOM.cosines), field(table, scratch, ROOM.sines)
        cos, sin = tensor(table, AT.state_cos), tensor(table, AT.state_sin)
        invert(table, cos, sin, 1, b, token % cos.length, cosines, sines, zero)


@called_kernel
def turn_back(table, scratch, x, b, head, at, zero):
    """A query or key into `content`."""
    content, size = field(table, scratch, ROOM.content), size_of(zero)
    clear(content, padded(x.width, size), zero)
    load_row(content, x, b, head, at, zero)
    turn_pairs(table, content, field(table, scratch, ROOM.cosines), field(table, scratch, ROOM.sines), zero)


@called_kernel
def project(out, x, weight, head, zero):
    """out <- x W of a head, W (d, r)."""
    size, at, by = size_of(zero), row(weight, 0, head, 0), weight.by_row
    whole = weight.width * size // BYTES * BYTES
    four = whole // (4 * BYTES) * 4 * BYTES
    for c in range(0, four, 4 * BYTES):
        s, t, u, v = splat(zero), splat(zero), splat(zero), splat(zero)
        for j in range(weight.length):
            factor, place = splat(get(x + j * size, zero)), at + j * by + c
            s, t = fma(factor, load(place, zero), s), fma(factor, load(place + BYTES, zero), t)
            u, v = fma(factor, load(place + 2 * BYTES, zero), u), fma(factor, load(place + 3 * BYTES, zero), v)
        store(out + c, s)
        store(out + c + BYTES, t)
        store(out + c + 2 * BYTES, u)
        store(out + c + 3 * BYTES, v)
    for c in range(four, whole, BYTES):
        s = splat(zero)
        for j in range(weight.length):
            s = fma(splat(get(x + j * size, zero)), load(at + j * by + c, zero), s)
        store(out + c, s)
    for c in range(whole // size, weight.width):
        found = zero
        for j in range(weight.length):
            found += get(x + j * size, zero) * get(at + j * by + c * size, zero)
        put(out + c * size, found)


@called_kernel
def load_fading(table, scratch, kv, at, zero):
    """How far each feature has faded at a position, as an exponent."""
    fading, fp = field(table, scratch, ROOM.fading), padded(width(table, AT.query_weight), size_of(zero))
    clear(fading, fp, zero)
    if there(table, AT.log_rate):
        load_row(fading, tensor(table, AT.log_rate), 0, kv, 0, zero)
        position = splat(number(at, zero))
        fastest, faded = splat(value(table, IN.fastest, zero)), splat(value(table, IN.faded, zero))
        for c in range(0, fp, BYTES):
            rate = smaller(exp(load(fading + c, zero)), fastest)
            store(fading + c, smaller(times(rate, position), faded))


@called_kernel
def load_parameters(table, scratch, x, head, zero):
    """A row of parameters, filled up with zeros."""
    buffer = field(table, scratch, ROOM.parameters)
    clear(buffer, padded(x.width, size_of(zero)), zero)
    load_row(buffer, x, 0, head, 0, zero)
    return buffer


@called_kernel
def key_features(table, scratch, keys, b, head, at, kv, position, zero):
    """exp(k P + b + fading) into `fk`, of row `at` of the keys, whose `head` is key head `kv` of the layer."""
    out, fp = field(table, scratch, ROOM.fk), padded(width(table, AT.key_weight), size_of(zero))
    load_fading(table, scratch, kv, position, zero)
    turn_back(table, scratch, keys, b, head, at, zero)
    project(out, field(table, scratch, ROOM.content), tensor(table, AT.key_weight), kv, zero)
    bias = load_parameters(table, scratch, tensor(table, AT.key_bias), kv, zero)
    most, fading = splat(value(table, IN.largest_size, zero)), field(table, scratch, ROOM.fading)
    for c in range(0, fp, BYTES):
        sized = smaller(plus(load(out + c, zero), load(bias + c, zero)), most)
        store(out + c, exp(plus(sized, load(fading + c, zero))))


@kernel
def exponentials(out, bias, pitch, zero):
    """out <- exp(out + bias - the largest); returns what makes their sum one."""
    best = splat(number(-math.inf, zero))
    for c in range(0, pitch, BYTES):
        logit = plus(load(out + c, zero), load(bias + c, zero))
        store(out + c, logit)
        best = larger(logit, best)
    top, sums = splat(-largest(best)), splat(zero)
    for c in range(0, pitch, BYTES):
        found = exp(plus(load(out + c, zero), top))
        store(out + c, found)
        sums = plus(sums, found)
    return number(1, zero) / total(sums)


@called_kernel
def query_features(table, scratch, head, out, zero):
    """exp(c - fading) softmax(q A + a) of the query in `content`."""
    size, r = size_of(zero), width(table, AT.query_weight)
    fp = padded(r, size)
    project(out, field(table, scratch, ROOM.content), tensor(table, AT.query_weight), head, zero)
    bias = load_parameters(table, scratch, tensor(table, AT.query_bias), head, zero)
    for i in range(r, fp // size):
        put(out + i * size, number(-math.inf, zero))
    share = splat(exponentials(out, bias, fp, zero))
    scale = load_parameters(table, scratch, tensor(table, AT.query_scale), head, zero)
    fading, most = field(table, scratch, ROOM.fading), value(table, IN.largest_scale, zero)
    for c in range(0, fp, BYTES):
        lift = larger(splat(-most), smaller(load(scale + c, zero), splat(most)))  # keeps what is not a number
        lift = exp(plus(lift, times(splat(number(-1, zero)), load(fading + c, zero))))
        store(out + c, times(times(load(out + c, zero), share), lift))


@called_kernel
def query_gain(table, scratch, b, head, zero):
    """The log-gain of the query in `content`."""
    if there(table, AT.gain):
        return get(row(tensor(table, AT.gain), b, head, 0), zero)
    gain = zero
    if there(table, AT.log_gain):
        gain += get(row(tensor(table, AT.log_gain), 0, head, 0), zero)
    if there(table, AT.gain_weight):
        weight = load_parameters(table, scratch, tensor(table, AT.gain_weight), head, zero)
        pitch = padded(width(table, AT.q), size_of(zero))
        gain += dot(field(table, scratch, ROOM.content), weight, pitch, zero)
    if get(word(table, IN.position) + 8 * b, WORD) >= word(table, IN.reach):
        gain = number(-math.inf, zero)
    return gain


@kernel
def computed(table):
    """Are features computed here, from parameters."""
    return there(table, AT.query_weight)
