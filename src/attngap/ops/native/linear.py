"""Causal linear attention and its gradients, token by token: the state of a head stays in the first cache.

With n_i = q_i . z_i, rows are o_i = q_i S_i / n_i. Let a_i = d_out_i / n_i and w_i = -a_i . o_i be the gradients of
numerator and normalizer, and D_i, y_i those of S_i and z_i, which run backward: D_i = g_{i+1} D_{i+1} + q_i a_i^T. Then

    dq_i = S_i a_i + w_i z_i,    dk_i = D_i v_i + y_i,    dv_i = k_i^T D_i

and, since a decay scales whatever crosses it, d log g_i is the sum of q_j * dq_j - k_j * dk_j over j >= i, channel by
channel, plus what the last state carries out. No score is formed, and nothing is kept but n_i, which waits in `norms`.

`gate` is log g as (b, ., t, 1 or r), or None; an argument of its own, since only then code for None is left out.
`scratch` is the address of zeros: `BUFFERS` pairs of buffers, then two states.
"""

from typing import NamedTuple

import numpy as np

from attngap.ops.native.memory import (
    Rows,
    add,
    cell,
    clear,
    dot,
    enter,
    give,
    leave,
    multiply,
    padded,
    row,
    spread,
    take,
    take_gate,
    turn,
)
from attngap.ops.native.vectors import BYTES, get, kernel, like_size, load, number, plus, put, splat, total

EPS = 1e-6  # the rule for vanishing normalizers, stated in `naive.linear_attention`
BUFFERS = 11


class Inputs(NamedTuple):
    """The heads of keys, gates and states divide those of q."""

    q: Rows
    k: Rows
    v: Rows
    S: Rows
    z: Rows  # (b, ., r, 1); not looked at unless normalized
    mask: Rows  # (b, 1, t, 1), bytes
    normalize: bool


class Results(NamedTuple):
    out: Rows
    S: Rows
    z: Rows


class Above(NamedTuple):
    """What the results were, and their gradients."""

    out: Rows
    d_out: Rows
    S: Rows
    z: Rows


class Grads(NamedTuple):
    q: Rows
    k: Rows
    v: Rows
    gate: Rows | None
    S: Rows
    z: Rows
    norms: Rows  # (b, h, t, .), the first of a row is used


@kernel
def forward(x, gate, to, like, scratch, first, last):
    """Lanes first <= b * h < last."""
    h, t, one, size = x.q.heads, x.q.length, number(1, like), like_size(like)
    pitch, width = padded(max(x.q.width, x.v.width), size), padded(x.v.width, size)
    queries, keys, values, rows = scratch, scratch + 2 * pitch, scratch + 4 * pitch, scratch + 6 * pitch
    sums, weights, state = scratch + 8 * pitch, scratch + 10 * pitch, scratch + 2 * BUFFERS * pitch
    gates = None if gate is None else scratch + 12 * pitch
    put(weights, one)
    put(weights + pitch, one)
    for lane in range(first, last):
        b, head = lane // h, lane % h
        kv, held = head * x.k.heads // h, head * x.S.heads // h
        enter(state, x.S, b, held, False, like)
        if x.normalize:
            take_sums(sums + pitch, x.z, b, held, like)
        for i in range(0, t, 2):
            for s in range(2):
                at, here = min(i + s, t - 1), s * pitch
                there = at == i + s and is_there(x.mask, b, at)
                take(queries + here, x.q, b, head, at, there, like)
                take(keys + here, x.k, b, kv, at, there, like)
                take(values + here, x.v, b, kv, at, there, like)
                if gate is not None:
                    take_gate(gates + here, gate, b, head * gate.heads // h, at, there, pitch, like)
            turn(state, x.q.width, width, keys, values, queries, rows, gates, None, pitch, like)
            if x.normalize:
                sum_up(sums, weights, keys, gates, pitch, like)
            for s in range(min(2, t - i)):
                n = safe(dot(queries + s * pitch, sums + s * pitch, pitch, like), like) if x.normalize else one
                give(to.out, b, head, i + s, rows + s * pitch, one / n, True, like)
        if head * x.S.heads % h == 0:
            leave(to.S, b, held, state, True, like)
            if x.normalize:
                give_sums(to.z, b, held, sums + pitch, True, like)


@kernel
def backward(x, gate, above, to, like, scratch, first, last):
    """Lanes first <= b * h_kv < last: heads that share keys are one lane, since they add to the same gradients."""
    group = x.q.heads // x.k.heads
    for lane in range(first, last):
        b, kv = lane // x.k.heads, lane % x.k.heads
        for head in range(kv * group, (kv + 1) * group):
            grads_of_queries(x, gate, above, to, like, scratch, b, head)
            grads_of_keys(x, gate, above, to, like, scratch, b, head)


@kernel
def grads_of_queries(x, gate, above, to, like, scratch, b, head):
    """Forward in time with the transposed state; what the last state carries out is left in buffer 9."""
    h, t, one, size = x.q.heads, x.q.length, number(1, like), like_size(like)
    pitch, width = padded(max(x.q.width, x.v.width), size), padded(x.q.width, size)
    queries, keys, values, rows = scratch, scratch + 2 * pitch, scratch + 4 * pitch, scratch + 6 * pitch
    grads, found, sums, weights = scratch + 8 * pitch, scratch + 10 * pitch, scratch + 12 * pitch, scratch + 14 * pitch
    gates = None if gate is None else scratch + 16 * pitch
    later, state = scratch + 18 * pitch, scratch + 2 * BUFFERS * pitch
    kv, held = head * x.k.heads // h, head * x.S.heads // h
    put(weights, one)
    put(weights + pitch, one)
    enter(state, x.S, b, held, True, like)
    if x.normalize:
        take_sums(sums + pitch, x.z, b, held, like)
    for i in range(0, t, 2):
        for s in range(2):
            at, here = min(i + s, t - 1), s * pitch
            there = at == i + s and is_there(x.mask, b, at)
            take(queries + here, x.q, b, head, at, there, like)
            take(keys + here, x.k, b, kv, at, there, like)
            take(values + here, x.v, b, kv, at, there, like)
            take(rows + here, above.out, b, head, at, there, like)
            take(grads + here, above.d_out, b, head, at, there, like)
            if gate is not None:
                take_gate(gates + here, gate, b, head * gate.heads // h, at, there, pitch, like)
        if x.normalize:
            sum_up(sums, weights, keys, gates, pitch, like)
            for s in range(min(2, t - i)):
                n = dot(queries + s * pitch, sums + s * pitch, pitch, like)
                put(row(to.norms, b, head, i + s), n)
                spread(grads + s * pitch, one / safe(n, like), grads + s * pitch, pitch, like)
        turn(state, x.v.width, width, values, keys, grads, found, None, gates, pitch, like)
        for s in range(min(2, t - i)):
            here = s * pitch
            if x.normalize:
                n = get(row(to.norms, b, head, i + s), like)
                add(found + here, weight(n, grads + here, rows + here, pitch, like), sums + here, pitch, like)
            give(to.q, b, head, i + s, found + here, one, True, like)
    clear(later, pitch, like)
    if gate is not None and head * x.S.heads % h == 0:
        carried_out(later, state, above.S, b, held, like)
        if x.normalize:
            take_sums(found, above.z, b, held, like)
            multiply(found, found, sums + pitch, width, like)
            add(later, one, found, width, like)


@kernel
def grads_of_keys(x, gate, above, to, like, scratch, b, head):
    """Backward in time with the gradient of the state, D, and its transpose, E."""
    h, t, one, size = x.q.heads, x.q.length, number(1, like), like_size(like)
    pitch, wide, deep = padded(max(x.q.width, x.v.width), size), padded(x.q.width, size), padded(x.v.width, size)
    queries, keys, values, rows = scratch, scratch + 2 * pitch, scratch + 4 * pitch, scratch + 6 * pitch
    grads, d_keys, sums, weights = scratch + 8 * pitch, scratch + 10 * pitch, scratch + 12 * pitch, scratch + 14 * pitch
    gates = None if gate is None else scratch + 16 * pitch
    later, products, d_values = scratch + 18 * pitch, scratch + 19 * pitch, scratch + 20 * pitch
    D = scratch + 2 * BUFFERS * pitch
    E = D + x.q.width * deep
    kv, held, gated = head * x.k.heads // h, head * x.S.heads // h, 0 if gate is None else head * gate.heads // h
    own, fresh = head * x.S.heads % h == 0, head * x.k.heads % h == 0
    if own:
        enter(D, above.S, b, held, False, like)
        enter(E, above.S, b, held, True, like)
        take_sums(sums + pitch, above.z, b, held, like)
    else:
        clear(D, x.q.width * deep + x.v.width * wide, like)
        clear(sums, 2 * pitch, like)
    for i in range(t - 1, -1 if gate is None else -2, -2):
        for s in range(2):
            at, here = max(i - s, 0), s * pitch
            there = at == i - s and is_there(x.mask, b, at)
            take(queries + here, x.q, b, head, at, there, like)
            take(keys + here, x.k, b, kv, at, there, like)
            take(values + here, x.v, b, kv, at, there, like)
            take(rows + here, above.out, b, head, at, there, like)
            take(grads + here, above.d_out, b, head, at, there, like)
            put(weights + here, like)
            if x.normalize and there:
                n = get(row(to.norms, b, head, at), like)
                spread(grads + here, one / safe(n, like), grads + here, pitch, like)
                put(weights + here, weight(n, grads + here, rows + here, pitch, like))
            if gate is not None:  # the gate between this token and the one after it
                at = min(max(i - s + 1, 0), t - 1)
                there = at == i - s + 1 and is_there(x.mask, b, at)
                take_gate(gates + here, gate, b, gated, at, there, pitch, like)
        turn(D, x.q.width, deep, queries, grads, keys, d_values, gates, None, pitch, like)
        turn(E, x.v.width, wide, grads, queries, values, d_keys, None, gates, pitch, like)
        if x.normalize:
            sum_up(sums, weights, queries, gates, pitch, like)
        for s in range(min(2, i + 1)):
            at, here = i - s, s * pitch
            there = is_there(x.mask, b, at)
            if x.normalize:
                add(d_keys + here, one, sums + here, pitch, like)
            give(to.k, b, kv, at, d_keys + here, one if there else like, fresh, like)
            give(to.v, b, kv, at, d_values + here, one, fresh, like)
            if gate is not None:
                take(products, to.q, b, head, at, True, like)
                multiply(products, products, queries + here, wide, like)
                add(later, one, products, wide, like)
                multiply(products, keys + here, d_keys + here, wide, like)
                add(later, -one, products, wide, like)
                give_gate(to.gate, b, gated, at, later, there, head * gate.heads % h == 0, wide, like)
    leave(to.S, b, held, D, own, like)
    if x.normalize:
        give_sums(to.z, b, held, sums + pitch, own, like)


@kernel
def is_there(mask, b, i):
    return get(row(mask, b, 0, i), np.uint8(0)) != 0


@kernel
def sum_up(sums, weights, keys, gates, pitch, like):
    """z after token 0, then after token 1, from the second buffer on: z <- gate * z + weight * key."""
    for s in range(2):
        here, other = sums + s * pitch, sums + (1 - s) * pitch
        if gates is not None:
            multiply(here, other, gates + s * pitch, pitch, like)
        else:
            spread(here, number(1, like), other, pitch, like)
        add(here, get(weights + s * pitch, like), keys + s * pitch, pitch, like)


@kernel
def take_sums(buffer, z, b, head, like):
    for c in range(z.length):
        put(buffer + c * like_size(like), get(row(z, b, head, c), like))


@kernel
def give_sums(z, b, head, buffer, fresh, like):
    for c in range(z.length):
        at, found = row(z, b, head, c), get(buffer + c * like_size(like), like)
        put(at, found if fresh else found + get(at, like))


@kernel
def safe(n, like):
    """|n| below EPS becomes EPS with the sign of n."""
    eps = number(EPS, like)
    if abs(n) < eps:
        return -eps if n < 0 else eps
    return n


@kernel
def weight(n, grads, rows, pitch, like):
    """The gradient of a normalizer; a replaced one is a constant."""
    return like if abs(n) < number(EPS, like) else -dot(grads, rows, pitch, like)


@kernel
def carried_out(later, state, dS, b, head, like):
    """Channel by channel, the last state, which is transposed, times its gradient."""
    size = like_size(like)
    for c in range(dS.length):
        found = like
        for j in range(dS.width):
            d = get(row(dS, b, head, c) + j * dS.by_column, like)
            found += get(cell(state, dS.width, dS.length, j, c, size), like) * d
        put(later + c * size, found)


@kernel
def give_gate(d_gate, b, head, i, later, there, fresh, width, like):
    """One number a channel, or their sum."""
    if d_gate.width > 1:
        give(d_gate, b, head, i, later, number(1, like) if there else like, fresh, like)
    else:
        at, sums = row(d_gate, b, head, i), splat(like)
        for c in range(0, width if there else 0, BYTES):
            sums = plus(sums, load(later + c, like))
        found = total(sums)
        put(at, found if fresh else found + get(at, like))
