"""One token of all heads of a layer, compiled; the state is updated in place.

A lane is a key head of a sequence. The token in the slot of the new one leaves the window and joins S and z; then every
query head reads sinks and window in the order of their slots, which does not matter, and the sums. Heads that are kept
exact read their whole cache instead. See `state` for the slots.
"""

import math
from typing import NamedTuple

import numpy as np

from attngap.ops.hybrid.kernels import combine
from attngap.ops.hybrid.kernels_rows import add, clear, dot, load_row, scale_row, set_row
from attngap.ops.native.memory import clear_fields, padded, row, safe
from attngap.ops.native.tensors import Rows
from attngap.ops.native.vectors import (
    BYTES,
    called_kernel,
    exp,
    get,
    kernel,
    load,
    number,
    plus,
    put,
    size_of,
    splat,
    store,
    total,
)

WORD, FLAG = np.int64(0), np.uint8(0)


class Token(NamedTuple):
    """One token, (b, heads, 1, width)."""

    q: Rows
    k: Rows
    v: Rows
    fq: Rows
    fk: Rows
    gain: Rows
    real: int  # address of (b,) bytes: is it no padding
    out: Rows


class State(NamedTuple):
    k: Rows
    v: Rows
    fk: Rows
    S: Rows
    z: Rows
    count: int  # address of (b,) int64: tokens before this one


class Kept(NamedTuple):
    """Heads that read all keys: their cache, this token included."""

    keys: Rows  # (b, groups, n, d)
    values: Rows
    allowed: Rows  # (b, 1, n, 1) bytes: which tokens may be read
    place: int  # address of (h,) int64: where in the cache a head's keys are, -1 for heads that are not kept


class Options(NamedTuple):
    window: int
    sinks: int
    scale: float
    relative: bool


class Room(NamedTuple):
    query: int
    fq: int
    row: int
    result: int
    weights: int
    end: int
    guard: int


@kernel
def find(buffer, x, b, head, i, zero):
    """The address of a row of whole vectors: where it is, or of a copy."""
    if x.by_column == size_of(zero) and x.width * size_of(zero) == padded(x.width, size_of(zero)):
        return row(x, b, head, i)
    load_row(buffer, x, b, head, i, zero)
    return buffer


@called_kernel
def push(x, state, o, room, scratch, b, kv, count, zero):
    """The new token takes its slot; the one that had it joins the sums."""
    full, size = o.sinks + o.window, size_of(zero)
    slot = count if count < full else o.sinks + (count - o.sinks) % o.window
    buffer = scratch + room.result
    if count >= full:
        value = find(scratch + room.row, state.v, b, kv, slot, zero)
        vp = padded(state.v.width, size)
        for c in range(state.S.length):
            feature = get(row(state.fk, b, kv, slot - o.sinks) + c * state.fk.by_column, zero)
            if feature != zero:
                sums = find(buffer, state.S, b, kv, c, zero)
                add(sums, feature, value, vp, zero)
                if sums == buffer:
                    set_row(state.S, b, kv, c, buffer, number(1, zero), zero)
            place = row(state.z, b, kv, c)
            put(place, get(place, zero) + feature)
    load_row(buffer, x.k, b, kv, 0, zero)
    set_row(state.k, b, kv, slot, buffer, number(1, zero), zero)
    load_row(buffer, x.v, b, kv, 0, zero)
    set_row(state.v, b, kv, slot, buffer, number(1, zero), zero)
    if slot >= o.sinks:
        load_row(scratch + room.fq, x.fk, b, kv, 0, zero)
        set_row(state.fk, b, kv, slot - o.sinks, scratch + room.fq, number(1, zero), zero)


@called_kernel
def near_logits(query, keys, b, head, count, weights, buffer, zero):
    """Into `weights`, -inf up to whole vectors after them; the largest."""
    size, kp = size_of(zero), padded(keys.width, size_of(zero))
    top = number(-math.inf, zero)
    for i in range(count):
        logit = dot(query, find(buffer, keys, b, head, i, zero), kp, zero)
        put(weights + i * size, logit)
        top = max(top, logit)
    for i in range(count, -(-count * size // BYTES) * BYTES // size):
        put(weights + i * size, number(-math.inf, zero))
    return top


@called_kernel
def weigh(weights, count, unit, zero):
    """exp(logit - unit) in place, and the sum."""
    sums, shift = splat(zero), splat(-unit)
    for c in range(0, count * size_of(zero), BYTES):
        found = exp(plus(load(weights + c, zero), shift))
        store(weights + c, found)
        sums = plus(sums, found)
    return total(sums)


@called_kernel
def mix(result, weights, values, b, head, count, buffer, zero):
    """result <- result + sum of weighted values."""
    size, vp = size_of(zero), padded(values.width, size_of(zero))
    for i in range(count):
        weight = get(weights + i * size, zero)
        if weight != zero:
            add(result, weight, find(buffer, values, b, head, i, zero), vp, zero)


@called_kernel
def read_state(x, state, o, room, scratch, b, kv, head, count, zero):
    """The output of one head from sinks, window and sums; `count` includes the new token."""
    size = size_of(zero)
    fp, vp = padded(x.fq.width, size), padded(x.v.width, size)
    query, fq, buffer = scratch + room.query, scratch + room.fq, scratch + room.row
    result, weights = scratch + room.result, scratch + room.weights
    near = min(count, o.sinks + o.window)
    top = near_logits(query, state.k, b, kv, near, weights, buffer, zero)
    load_row(fq, x.fq, b, head, 0, zero)
    mass = zero
    for c in range(state.z.length):
        mass += get(fq + c * size, zero) * get(row(state.z, b, kv, c), zero)
    gain = get(row(x.gain, b, head, 0), zero)
    unit, lift = combine(top, gain + top if o.relative else gain, mass, zero)
    norm = weigh(weights, near, unit, zero) + mass * lift
    clear(result, vp, zero)
    mix(result, weights, state.v, b, kv, near, buffer, zero)
    scale_row(fq, lift, fq, fp, zero)
    if lift != zero:
        mix(result, fq, state.S, b, kv, state.S.length, buffer, zero)
    set_row(x.out, b, head, 0, result, number(1, zero) / safe(norm, zero), zero)


@called_kernel
def read_cache(x, kept, room, scratch, b, head, place, zero):
    """The output of one head from all keys that it may read."""
    size, n = size_of(zero), kept.keys.length
    query, buffer, weights = scratch + room.query, scratch + room.row, scratch + room.weights
    near_logits(query, kept.keys, b, place, n, weights, buffer, zero)
    top = number(-math.inf, zero)
    for i in range(n):
        if get(row(kept.allowed, b, 0, i), FLAG) == 0:
            put(weights + i * size, number(-math.inf, zero))
        top = max(top, get(weights + i * size, zero))
    norm = weigh(weights, n, top, zero)
    clear(scratch + room.result, padded(x.v.width, size), zero)
    mix(scratch + room.result, weights, kept.values, b, place, n, buffer, zero)
    set_row(x.out, b, head, 0, scratch + room.result, number(1, zero) / norm, zero)


@kernel
def decode(x, state, kept, o, room, zero, scratch, first_lane, last_lane):
    """Lanes first <= b * h_kv < last."""
    group = x.q.heads // x.k.heads
    kp = padded(x.q.width, size_of(zero))
    for lane in range(first_lane, last_lane):
        b, kv = lane // x.k.heads, lane % x.k.heads
        clear_fields(scratch, room, zero)
        real = get(x.real + b, FLAG) != 0
        count = get(state.count + 8 * b, WORD)
        if real:
            push(x, state, o, room, scratch, b, kv, count, zero)
        for head in range(kv * group, (kv + 1) * group):
            place = get(kept.place + 8 * head, WORD)
            if not real:
                clear(scratch + room.result, padded(x.v.width, size_of(zero)), zero)
                set_row(x.out, b, head, 0, scratch + room.result, zero, zero)
                continue
            load_row(scratch + room.query, x.q, b, head, 0, zero)
            scale_row(scratch + room.query, number(o.scale, zero), scratch + room.query, kp, zero)
            if place < 0:
                read_state(x, state, o, room, scratch, b, kv, head, count + 1, zero)
            else:
                read_cache(x, kept, room, scratch, b, head, place, zero)
