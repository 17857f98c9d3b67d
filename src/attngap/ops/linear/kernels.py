"""Causal linear attention and its gradients, token by token: the state of a head stays in the first cache.

With n_i = q_i . z_i, rows are o_i = q_i S_i / n_i. Let a_i = d_out_i / n_i and w_i = -a_i . o_i be the gradients of
numerator and normalizer, and D_i, y_i those of S_i and z_i, which run backward: D_i = g_{i+1} D_{i+1} + q_i a_i^T. Then

    dq_i = S_i a_i + w_i z_i,    dk_i = D_i v_i + y_i,    dv_i = k_i^T D_i

and, since a decay scales whatever crosses it, d log g_i is the sum of q_j * dq_j - k_j * dk_j over j >= i, channel by
channel, plus what the last state carries out. No score is formed, and nothing is kept but n_i, which waits in `norms`.

`gate` is log g as (b, ., t, 1 or r), or None; an argument of its own, since only then code for None is left out.
`scratch` is the address of scratch memory with the fields of `Room`. It is cleared for every lane: what one leaves
there, infinite or not, the next must not see.
"""

from typing import NamedTuple

import numpy as np

from attngap.ops.native.memory import (
    add,
    cell,
    clear,
    clear_fields,
    dot,
    load_gate,
    load_row,
    load_state,
    multiply,
    padded,
    row,
    safe,
    scale_row,
    store_row,
    store_state,
    update_and_read,
)
from attngap.ops.native.tensors import Rows
from attngap.ops.native.vectors import BYTES, get, kernel, load, number, plus, put, size_of, splat, total
from attngap.ops.normalizer import EPS


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


class LinearGradRows(NamedTuple):
    q: Rows
    k: Rows
    v: Rows
    gate: Rows | None
    S: Rows
    z: Rows
    norms: Rows  # (b, h, t, .), the first of a row is used


class Room(NamedTuple):
    """Offsets in scratch memory: pairs of buffers, one for each of two tokens, then the state, and its transpose."""

    queries: int
    keys: int
    values: int
    rows: int
    grads: int
    found: int  # the gradients of queries, or of keys
    sums: int
    weights: int
    gates: int
    later: int
    products: int
    d_values: int
    state: int
    transposed: int
    end: int
    guard: int


@kernel
def forward(x, gate, to, room, zero, scratch, first, last):
    """Lanes first <= b * h < last."""
    h, t, one, size = x.q.heads, x.q.length, number(1, zero), size_of(zero)
    pitch, width = padded(max(x.q.width, x.v.width), size), padded(x.v.width, size)
    queries, keys, values, rows = (
        scratch + room.queries,
        scratch + room.keys,
        scratch + room.values,
        scratch + room.rows,
    )
    sums, weights, state = scratch + room.sums, scratch + room.weights, scratch + room.state
    gates = None if gate is None else scratch + room.gates
    for lane in range(first, last):
        b, head = lane // h, lane % h
        kv, held = head * x.k.heads // h, head * x.S.heads // h
        clear_fields(scratch, room, zero)
        put(weights, one)
        put(weights + pitch, one)
        load_state(state, x.S, b, held, False, zero)
        if x.normalize:
            load_column(sums + pitch, x.z, b, held, zero)
        for i in range(0, t, 2):
            for s in range(2):
                at, here = min(i + s, t - 1), s * pitch
                real = at == i + s and is_real(x.mask, b, at)
                load_row(queries + here, x.q, b, head, at, real, zero)
                load_row(keys + here, x.k, b, kv, at, real, zero)
                load_row(values + here, x.v, b, kv, at, real, zero)
                if gate is not None:
                    load_gate(gates + here, gate, b, head * gate.heads // h, at, real, pitch, zero)
            update_and_read(state, x.q.width, width, keys, values, queries, rows, gates, None, pitch, zero)
            if x.normalize:
                sum_up(sums, weights, keys, gates, pitch, zero)
            for s in range(min(2, t - i)):
                n = safe(dot(queries + s * pitch, sums + s * pitch, pitch, zero), zero) if x.normalize else one
                store_row(to.out, b, head, i + s, rows + s * pitch, one / n, True, zero)
        if head * x.S.heads % h == 0:
            store_state(to.S, b, held, state, True, zero)
            if x.normalize:
                store_column(to.z, b, held, sums + pitch, True, zero)


@kernel
def backward(x, gate, above, to, room, zero, scratch, first, last):
    """Lanes first <= b * h_kv < last: heads that share keys are one lane, since they add to the same gradients."""
    group = x.q.heads // x.k.heads
    for lane in range(first, last):
        b, kv = lane // x.k.heads, lane % x.k.heads
        for head in range(kv * group, (kv + 1) * group):
            clear_fields(scratch, room, zero)
            grads_of_queries(x, gate, above, to, room, zero, scratch, b, head)
            grads_of_keys(x, gate, above, to, room, zero, scratch, b, head)


@kernel
def grads_of_queries(x, gate, above, to, room, zero, scratch, b, head):
    """Forward in time with the transposed state; what the last state carries out is left in `later`."""
    h, t, one, size = x.q.heads, x.q.length, number(1, zero), size_of(zero)
    pitch, width = padded(max(x.q.width, x.v.width), size), padded(x.q.width, size)
    queries, keys, values, rows = (
        scratch + room.queries,
        scratch + room.keys,
        scratch + room.values,
        scratch + room.rows,
    )
    grads, found, sums, weights = (
        scratch + room.grads,
        scratch + room.found,
        scratch + room.sums,
        scratch + room.weights,
    )
    gates = None if gate is None else scratch + room.gates
    later, state = scratch + room.later, scratch + room.transposed
    kv, held = head * x.k.heads // h, head * x.S.heads // h
    put(weights, one)
    put(weights + pitch, one)
    load_state(state, x.S, b, held, True, zero)
    if x.normalize:
        load_column(sums + pitch, x.z, b, held, zero)
    for i in range(0, t, 2):
        for s in range(2):
            at, here = min(i + s, t - 1), s * pitch
            real = at == i + s and is_real(x.mask, b, at)
            load_row(queries + here, x.q, b, head, at, real, zero)
            load_row(keys + here, x.k, b, kv, at, real, zero)
            load_row(values + here, x.v, b, kv, at, real, zero)
            load_row(rows + here, above.out, b, head, at, real, zero)
            load_row(grads + here, above.d_out, b, head, at, real, zero)
            if gate is not None:
                load_gate(gates + here, gate, b, head * gate.heads // h, at, real, pitch, zero)
        if x.normalize:
            sum_up(sums, weights, keys, gates, pitch, zero)
            for s in range(min(2, t - i)):
                n = dot(queries + s * pitch, sums + s * pitch, pitch, zero)
                put(row(to.norms, b, head, i + s), n)
                scale_row(grads + s * pitch, one / safe(n, zero), grads + s * pitch, pitch, zero)
        update_and_read(state, x.v.width, width, values, keys, grads, found, None, gates, pitch, zero)
        for s in range(min(2, t - i)):
            here = s * pitch
            if x.normalize:
                n = get(row(to.norms, b, head, i + s), zero)
                add(found + here, weight(n, grads + here, rows + here, pitch, zero), sums + here, pitch, zero)
            store_row(to.q, b, head, i + s, found + here, one, True, zero)
    clear(later, pitch, zero)
    if gate is not None and head * x.S.heads % h == 0:
        carried_out(later, state, above.S, b, held, zero)
        if x.normalize:
            load_column(found, above.z, b, held, zero)
            multiply(found, found, sums + pitch, width, zero)
            add(later, one, found, width, zero)


@kernel
def grads_of_keys(x, gate, above, to, room, zero, scratch, b, head):
    """Backward in time with the gradient of the state, D, and its transpose, E."""
    h, t, one, size = x.q.heads, x.q.length, number(1, zero), size_of(zero)
    pitch, wide, deep = padded(max(x.q.width, x.v.width), size), padded(x.q.width, size), padded(x.v.width, size)
    queries, keys, values, rows = (
        scratch + room.queries,
        scratch + room.keys,
        scratch + room.values,
        scratch + room.rows,
    )
    grads, d_keys, sums, weights = (
        scratch + room.grads,
        scratch + room.found,
        scratch + room.sums,
        scratch + room.weights,
    )
    gates = None if gate is None else scratch + room.gates
    later, products, d_values = scratch + room.later, scratch + room.products, scratch + room.d_values
    D, E = scratch + room.state, scratch + room.transposed
    kv, held, gated = head * x.k.heads // h, head * x.S.heads // h, 0 if gate is None else head * gate.heads // h
    own, fresh = head * x.S.heads % h == 0, head * x.k.heads % h == 0
    if own:
        load_state(D, above.S, b, held, False, zero)
        load_state(E, above.S, b, held, True, zero)
        load_column(sums + pitch, above.z, b, held, zero)
    else:
        clear(D, x.q.width * deep, zero)
        clear(E, x.v.width * wide, zero)
        clear(sums, 2 * pitch, zero)
    for i in range(t - 1, -1 if gate is None else -2, -2):
        for s in range(2):
            at, here = max(i - s, 0), s * pitch
            real = at == i - s and is_real(x.mask, b, at)
            load_row(queries + here, x.q, b, head, at, real, zero)
            load_row(keys + here, x.k, b, kv, at, real, zero)
            load_row(values + here, x.v, b, kv, at, real, zero)
            load_row(rows + here, above.out, b, head, at, real, zero)
            load_row(grads + here, above.d_out, b, head, at, real, zero)
            put(weights + here, zero)
            if x.normalize and real:
                n = get(row(to.norms, b, head, at), zero)
                scale_row(grads + here, one / safe(n, zero), grads + here, pitch, zero)
                put(weights + here, weight(n, grads + here, rows + here, pitch, zero))
            if gate is not None:  # the gate between this token and the one after it
                at = min(max(i - s + 1, 0), t - 1)
                real = at == i - s + 1 and is_real(x.mask, b, at)
                load_gate(gates + here, gate, b, gated, at, real, pitch, zero)
        update_and_read(D, x.q.width, deep, queries, grads, keys, d_values, gates, None, pitch, zero)
        update_and_read(E, x.v.width, wide, grads, queries, values, d_keys, None, gates, pitch, zero)
        if x.normalize:
            sum_up(sums, weights, queries, gates, pitch, zero)
        for s in range(min(2, i + 1)):
            at, here = i - s, s * pitch
            real = is_real(x.mask, b, at)
            if x.normalize:
                add(d_keys + here, one, sums + here, pitch, zero)
            store_row(to.k, b, kv, at, d_keys + here, one if real else zero, fresh, zero)
            store_row(to.v, b, kv, at, d_values + here, one, fresh, zero)
            if gate is not None:
                load_row(products, to.q, b, head, at, True, zero)
                multiply(products, products, queries + here, wide, zero)
                add(later, one, products, wide, zero)
                multiply(products, keys + here, d_keys + here, wide, zero)
                add(later, -one, products, wide, zero)
                store_gate(to.gate, b, gated, at, later, real, head * gate.heads % h == 0, wide, zero)
    store_state(to.S, b, held, D, own, zero)
    if x.normalize:
        store_column(to.z, b, held, sums + pitch, own, zero)


@kernel
def is_real(mask, b, i):
    return get(row(mask, b, 0, i), np.uint8(0)) != 0


@kernel
def sum_up(sums, weights, keys, gates, pitch, zero):
    """z after token 0, then after token 1, from the second buffer on: z <- gate * z + weight * key."""
    for s in range(2):
        here, other = sums + s * pitch, sums + (1 - s) * pitch
        if gates is not None:
            multiply(here, other, gates + s * pitch, pitch, zero)
        else:
            scale_row(here, number(1, zero), other, pitch, zero)
        add(here, get(weights + s * pitch, zero), keys + s * pitch, pitch, zero)


@kernel
def load_column(buffer, z, b, head, zero):
    for c in range(z.length):
        put(buffer + c * size_of(zero), get(row(z, b, head, c), zero))


@kernel
def store_column(z, b, head, buffer, fresh, zero):
    for c in range(z.length):
        at, found = row(z, b, head, c), get(buffer + c * size_of(zero), zero)
        put(at, found if fresh else found + get(at, zero))


@kernel
def weight(n, grads, rows, pitch, zero):
    """The gradient of a normalizer; a replaced one is a constant."""
    return zero if abs(n) < number(EPS, zero) else -dot(grads, rows, pitch, zero)


@kernel
def carried_out(later, state, dS, b, head, zero):
    """Channel by channel, the last state, which is transposed, times its gradient."""
    size = size_of(zero)
    for c in range(dS.length):
        found = zero
        for j in range(dS.width):
            d = get(row(dS, b, head, c) + j * dS.by_column, zero)
            found += get(cell(state, dS.width, dS.length, j, c, size), zero) * d
        put(later + c * size, found)


@kernel
def store_gate(d_gate, b, head, i, later, real, fresh, width, zero):
    """One number a channel, or their sum."""
    if d_gate.width > 1:
        store_row(d_gate, b, head, i, later, number(1, zero) if real else zero, fresh, zero)
    else:
        at, sums = row(d_gate, b, head, i), splat(zero)
        for c in range(0, width if real else 0, BYTES):
            sums = plus(sums, load(later + c, zero))
        found = total(sums)
        put(at, found if fresh else found + get(at, zero))
