"""Turns of one key head, one after the other. Queries lie beside each other, one in each place of a vector."""

import math
from typing import NamedTuple

import numpy as np

from attngap.ops.native.memory import clear
from attngap.ops.native.vectors import (
    BYTES,
    between,
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
    splat,
    store,
    times,
    total,
)

WORD = np.int64(0)
AT_ONCE = 4  # keys: as many sums run side by side


class Inputs(NamedTuple):
    """Addresses of tensors without gaps, and their sizes."""

    k: int  # (kv, n, d)
    asked: int  # (turns, kv, rows, d)
    score: int  # (kv, n), overwritten
    held: int  # (turns + 1, kv, held) int64; the first of them is given
    lost: int  # (turns, kv, turn) int64
    turns: int
    kv: int
    n: int
    d: int
    rows: int
    sinks: int
    slots: int
    count: int  # held
    turn: int
    every: int
    fading: float


class Room(NamedTuple):
    """Offsets of the fields of scratch memory; sizes are in `compiled.choosing_room`."""

    queries: int  # d vectors
    logits: int  # a vector for each slot
    weights: int  # a number for each slot
    keys: int  # addresses of the keys in the slots
    places: int  # of those that compete
    scores: int  # theirs
    sorted: int  # the same, partly in order
    end: int
    guard: int


@kernel
def weigh(x, vectors_first, asked, room, scratch, zero):
    """Add the squares of the weights of as many queries as a vector has places to the weights of all slots."""
    size, step = size_of(zero), x.every
    lanes = BYTES // size
    queries, logits = scratch + room.queries, scratch + room.logits
    valid = min(lanes, x.rows - vectors_first)
    for c in range(x.d):
        for lane in range(lanes):
            put(
                queries + c * BYTES + lane * size,
                get(asked + ((vectors_first + min(lane, valid - 1)) * x.d + c) * size, zero),
            )
    top = splat(number(-math.inf, zero))
    for slot in range(0, x.slots, AT_ONCE):
        one = get(scratch + room.keys + 8 * slot, WORD)
        two = get(scratch + room.keys + 8 * min(slot + 1, x.slots - 1), WORD)
        three = get(scratch + room.keys + 8 * min(slot + 2, x.slots - 1), WORD)
        four = get(scratch + room.keys + 8 * min(slot + 3, x.slots - 1), WORD)
        s1, s2, s3, s4 = splat(zero), splat(zero), splat(zero), splat(zero)
        for c in range(x.d):
            query = load(queries + c * BYTES, zero)
            s1 = fma(splat(get(one + c * size, zero)), query, s1)
            s2 = fma(splat(get(two + c * size, zero)), query, s2)
            s3 = fma(splat(get(three + c * size, zero)), query, s3)
            s4 = fma(splat(get(four + c * size, zero)), query, s4)
        at = logits + slot * BYTES
        store(at, s1)
        store(at + BYTES, s2)
        store(at + 2 * BYTES, s3)
        store(at + 3 * BYTES, s4)
    each = x.turn // step  # queries of a head that score
    for slot in range(x.slots - x.turn, x.slots):
        for lane in range(lanes):
            if slot >= x.slots - x.turn + step * ((vectors_first + lane) % each + 1):
                put(logits + slot * BYTES + lane * size, number(-math.inf, zero))
    for slot in range(x.slots):
        top = larger(load(logits + slot * BYTES, zero), top)
    top, sums = times(top, splat(number(-1, zero))), splat(zero)
    for slot in range(x.slots):
        share = exp(plus(load(logits + slot * BYTES, zero), top))
        store(logits + slot * BYTES, share)
        sums = plus(sums, share)
    scale = between(over(splat(number(1, zero)), sums), 0, valid, splat(zero))
    for slot in range(x.sinks, x.slots - x.turn):
        share = times(load(logits + slot * BYTES, zero), scale)
        at = scratch + room.weights + slot * size
        put(at, get(at, zero) + total(times(share, share)))


@kernel
def smallest_held(scores, count, held, numbers, zero):
    """The smallest of the `held` largest scores, and how many as small as it are among these; Hoare's selection."""
    size = size_of(zero)
    for i in range(count):
        put(numbers + i * size, get(scores + i * size, zero))
    low, high, wanted = 0, count - 1, held - 1
    while low < high:
        middle, i, j = get(numbers + (low + high) // 2 * size, zero), low, high
        while i <= j:
            while i < high and get(numbers + i * size, zero) > middle:
                i += 1
            while j > low and get(numbers + j * size, zero) < middle:
                j -= 1
            if i <= j:
                one = get(numbers + i * size, zero)
                put(numbers + i * size, get(numbers + j * size, zero))
                put(numbers + j * size, one)
                i, j = i + 1, j - 1
        if wanted <= j:
            high = j
        elif wanted >= i:
            low = i
        else:
            break
    least, larger_ones = get(numbers + wanted * size, zero), 0
    for i in range(count):
        larger_ones += get(scores + i * size, zero) > least
    return least, held - larger_ones


@kernel
def choose(x, room, zero, scratch, first_head, last_head):
    """Key heads first_head <= head < last_head."""
    size = size_of(zero)
    lanes, first, competing = BYTES // size, x.sinks + x.count, x.count + x.turn
    fading = number(x.fading, zero)
    places, scores, weights = scratch + room.places, scratch + room.scores, scratch + room.weights
    for head in range(first_head, last_head):
        keys, score = x.k + head * x.n * x.d * size, x.score + head * x.n * size
        for turn in range(x.turns):
            held = x.held + (turn * x.kv + head) * x.count * 8
            start = first + turn * x.turn
            for slot in range(x.slots):
                place = slot if slot < x.sinks else start + slot - first
                if x.sinks <= slot < first:
                    place = get(held + 8 * (slot - x.sinks), WORD)
                put(scratch + room.keys + 8 * slot, keys + place * x.d * size)
            clear(weights, -(-x.slots * size // BYTES) * BYTES, zero)
            for row in range(0, x.rows, lanes):
                weigh(x, row, x.asked + (turn * x.kv + head) * x.rows * x.d * size, room, scratch, zero)
            for slot in range(first, x.slots - x.turn):
                at = score + (start + slot - first) * size
                put(at, get(at, zero) * fading + get(weights + slot * size, zero))
            for i in range(competing):
                place = get(held + 8 * i, WORD) if i < x.count else start + i - x.count
                found = get(score + place * size, zero)
                if i < x.count:
                    found = found * fading + get(weights + (x.sinks + i) * size, zero)
                put(places + 8 * i, place)
                put(scores + i * size, found)
            to, lost = held + 8 * x.kv * x.count, x.lost + (turn * x.kv + head) * x.turn * 8
            least, equals = smallest_held(scores, competing, x.count, scratch + room.sorted, zero)
            taken = 0
            for i in range(competing):
                mine, place = get(scores + i * size, zero), get(places + 8 * i, WORD)
                equals -= mine == least
                wanted = mine > least or (mine == least and equals >= 0)
                # Scores that are not numbers have no order: never more than there is room for.
                if (wanted and taken < x.count) or i - taken >= x.turn:
                    put(to + 8 * taken, place)
                    put(score + place * size, mine)
                    taken += 1
                else:
                    put(lost + 8 * (i - taken), place)
