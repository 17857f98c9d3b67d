"""The delta rule and its gradients by token: S_i = g_i S_{i-1} + k_i u_i^T, u_i = beta_i (v_i - k_i^T g_i S_{i-1}).

Let D_i be the gradient of S_i, with what token i itself reads of it, and d_i = k_i^T D_i that of u_i. Backward in time

    D_{i-1} = g_i (D_i - beta_i k_i d_i^T) + q_{i-1} d_out_{i-1}^T,    dv_i = beta_i d_i

and with w_i = g_i S_{i-1} d_i, which needs the state once more, forward in time

    dq_i = S_i d_out_i,    dk_i = D_i u_i - beta_i w_i,    d beta_i = v_i . d_i - k_i . w_i

A decay scales whatever crosses it, so d log g_i is the sum of q_j * dq_j - k_j * (D_j u_j + beta_j w_j) over j >= i,
channel by channel, plus what the last state carries out. u_i is kept by the forward pass; d_i and D_i u_i wait for
the second pass of the backward in the rows of dv and dk.

`gate` is log g as (b, ., t, 1 or r), or None. `scratch` is the address of scratch memory with the fields of `Room`,
which is cleared for every lane.
"""

from typing import NamedTuple

from attngap.ops.linear.kernels import carried_out, is_real, store_gate
from attngap.ops.native.memory import (
    add,
    clear,
    clear_fields,
    dot,
    load_gate,
    load_row,
    load_state,
    multiply,
    padded,
    read_state,
    row,
    scale_row,
    store_row,
    store_state,
    update_and_read,
)
from attngap.ops.native.tensors import Rows
from attngap.ops.native.vectors import get, kernel, number, put, size_of


class Inputs(NamedTuple):
    """The heads of all others divide those of q; in `backward` they are those of q."""

    q: Rows
    k: Rows
    v: Rows
    beta: Rows  # (b, ., t, 1)
    S: Rows
    mask: Rows  # (b, 1, t, 1), bytes


class Results(NamedTuple):
    out: Rows
    S: Rows


class DeltaGradRows(NamedTuple):
    q: Rows
    k: Rows
    v: Rows
    beta: Rows
    gate: Rows | None
    S: Rows


class Room(NamedTuple):
    """Offsets in scratch memory: pairs of buffers, one for each of two tokens, then the state, and its transpose."""

    queries: int
    keys: int
    us: int
    rows: int  # of the output, or what nobody reads
    asked: int
    found: int
    gates: int
    written: int
    values: int
    read: int
    crossing: int
    row: int
    state: int
    transposed: int
    end: int
    guard: int


@kernel
def forward(x, gate, kept, to, room, zero, scratch, first, last):
    """Lanes first <= b * h < last; u goes to `kept`, (b, h, t, dv), unless it is None."""
    h, t, one, size = x.q.heads, x.q.length, number(1, zero), size_of(zero)
    pitch, width = padded(max(x.q.width, x.v.width), size), padded(x.v.width, size)
    queries, keys, us, rows = scratch + room.queries, scratch + room.keys, scratch + room.us, scratch + room.rows
    gates, state = None if gate is None else scratch + room.gates, scratch + room.state
    for lane in range(first, last):
        b, head = lane // h, lane % h
        held = head * x.S.heads // h
        clear_fields(scratch, room, zero)
        load_state(state, x.S, b, held, False, zero)
        for i in range(0, t, 2):
            for s in range(2):
                at = min(i + s, t - 1)
                load_row(queries + s * pitch, x.q, b, head, at, at == i + s and is_real(x.mask, b, at), zero)
            correct(state, x, gate, b, head, i, pitch, room, zero, scratch)
            update_and_read(state, x.q.width, width, keys, us, queries, rows, gates, None, pitch, zero)
            for s in range(min(2, t - i)):
                store_row(to.out, b, head, i + s, rows + s * pitch, one, True, zero)
                if kept is not None:
                    store_row(kept, b, head, i + s, us + s * pitch, one, True, zero)
        if head * x.S.heads % h == 0:
            store_state(to.S, b, held, state, True, zero)


@kernel
def correct(state, x, gate, b, head, i, pitch, room, zero, scratch):
    """Keys, u and gates of tokens i and i + 1, by way of `asked` and `found`; the state stays."""
    h, t, width = x.q.heads, x.k.length, padded(x.v.width, size_of(zero))
    keys, us, asked, found = scratch + room.keys, scratch + room.us, scratch + room.asked, scratch + room.found
    gates, kv = None if gate is None else scratch + room.gates, head * x.k.heads // h
    for s in range(2):
        at, here = min(i + s, t - 1), s * pitch
        real = at == i + s and is_real(x.mask, b, at)
        load_row(keys + here, x.k, b, kv, at, real, zero)
        load_row(us + here, x.v, b, kv, at, real, zero)
        scale_row(asked + here, number(1, zero), keys + here, pitch, zero)
        if gate is not None:
            load_gate(gates + here, gate, b, head * gate.heads // h, at, real, pitch, zero)
            multiply(asked + here, asked + here, gates + here, pitch, zero)
    between = dot(asked + pitch, keys, pitch, zero)  # what token 1 finds of token 0
    if gate is not None:
        multiply(asked + pitch, asked + pitch, gates, pitch, zero)
    read_state(state, x.k.width, width, asked, found, pitch, zero)
    for s in range(2):
        here = s * pitch
        add(us + here, number(-1, zero), found + here, width, zero)
        if s == 1:
            add(us + pitch, -between, us, width, zero)
        scale_row(us + here, strength(x, b, head * x.beta.heads // h, i + s, zero), us + here, width, zero)


@kernel
def strength(x, b, head, i, zero):
    """Beta; 0 where there is no token."""
    return get(row(x.beta, b, head, i), zero) if 0 <= i < x.beta.length and is_real(x.mask, b, i) else zero


@kernel
def backward(x, gate, u, above, to, room, zero, scratch, first, last):
    """Lanes first <= b * h < last; `above` holds the gradients of the results."""
    for lane in range(first, last):
        b, head = lane // x.q.heads, lane % x.q.heads
        clear_fields(scratch, room, zero)
        backward_in_time(x, gate, u, above, to, room, zero, scratch, b, head)
        forward_in_time(x, gate, u, above, to, room, zero, scratch, b, head)


@kernel
def backward_in_time(x, gate, u, above, to, room, zero, scratch, b, head):
    """d in the rows of dv, D u in those of dk; the gradient of the first state. A token takes both turns of a pair."""
    t, one, size = x.q.length, number(1, zero), size_of(zero)
    pitch, wide, deep = padded(max(x.q.width, x.v.width), size), padded(x.q.width, size), padded(x.v.width, size)
    keys, unused, asked, found = scratch + room.keys, scratch + room.rows, scratch + room.asked, scratch + room.found
    written, values, read = scratch + room.written, scratch + room.values, scratch + room.read
    gates = None if gate is None else scratch + room.gates
    D, E = scratch + room.state, scratch + room.transposed
    load_state(D, above.S, b, head, False, zero)
    load_state(E, above.S, b, head, True, zero)
    clear(asked, 2 * pitch, zero)
    clear(read, 2 * pitch, zero)
    if gate is not None:
        load_gate(gates + pitch, gate, b, head, 0, False, pitch, zero)
    for i in range(t - 1, -1 if gate is None else -2, -1):
        at = max(i, 0)
        real = at == i and is_real(x.mask, b, at)
        load_row(written, x.q, b, head, at, real, zero)
        load_row(keys, x.k, b, head, at, real, zero)
        load_row(values, above.out, b, head, at, real, zero)
        load_row(read, u, b, head, at, real, zero)
        scale_row(asked, one, keys, pitch, zero)
        if gate is not None:  # the gate between this token and the one after it
            after = min(i + 1, t - 1)
            load_gate(gates, gate, b, head, after, after == i + 1 and is_real(x.mask, b, after), pitch, zero)
            multiply(asked, asked, gates, pitch, zero)
        read_state(D, x.q.width, deep, asked, found, pitch, zero)
        scale_row(values + pitch, one, found, deep, zero)
        add(values + pitch, dot(keys, written, wide, zero), values, deep, zero)  # d
        scale_row(written + pitch, -strength(x, b, head, i, zero), keys, pitch, zero)
        update_and_read(D, x.q.width, deep, written, values, written, unused, gates, None, pitch, zero)
        update_and_read(E, x.v.width, wide, values, written, read, found, None, gates, pitch, zero)
        if i >= 0:
            store_row(to.k, b, head, i, found, one, True, zero)
            store_row(to.v, b, head, i, values + pitch, one, True, zero)
    store_state(to.S, b, head, D, True, zero)


@kernel
def forward_in_time(x, gate, u, above, to, room, zero, scratch, b, head):
    """Everything else, with the transposed state. A token takes both turns of a pair: to read, to write and read."""
    t, size = x.q.length, size_of(zero)
    pitch, wide = padded(max(x.q.width, x.v.width), size), padded(x.q.width, size)
    later, found, written, values = (
        scratch + room.rows,
        scratch + room.found,
        scratch + room.written,
        scratch + room.values,
    )
    read, keys = scratch + room.read, values + pitch  # the values of the second update
    gates, transposed = None if gate is None else scratch + room.gates, scratch + room.transposed
    load_state(transposed, x.S, b, head, True, zero)
    clear(written, 2 * pitch, zero)
    clear(values, 2 * pitch, zero)
    if gate is not None:
        load_gate(gates + pitch, gate, b, head, 0, False, pitch, zero)
    for i in range(t):
        real = is_real(x.mask, b, i)
        load_row(written + pitch, u, b, head, i, real, zero)
        load_row(keys, x.k, b, head, i, real, zero)
        load_row(read, to.v, b, head, i, real, zero)
        load_row(read + pitch, above.out, b, head, i, real, zero)
        if gate is not None:
            load_gate(gates, gate, b, head, i, real, pitch, zero)
        # w, then dq
        update_and_read(transposed, x.v.width, wide, written, values, read, found, None, gates, pitch, zero)
        finish(x, gate, to, keys, read, found, found + pitch, room, zero, scratch, b, head, i)
    if gate is not None:
        clear(later, pitch, zero)
        carried_out(later, transposed, above.S, b, head, zero)
        sum_crossing(to.gate, x.mask, later, x.q.width, zero, b, head)


@kernel
def finish(x, gate, to, key, d, w, dq, room, zero, scratch, b, head, i):
    """The gradients of token i; the one of the gate becomes what the token adds to the sum."""
    one, size = number(1, zero), size_of(zero)
    wide, deep = padded(x.q.width, size), padded(x.v.width, size)
    real, beta = is_real(x.mask, b, i), strength(x, b, head, i, zero)
    row_of, crossing = scratch + room.row, scratch + room.crossing
    store_row(to.q, b, head, i, dq, one, True, zero)
    load_row(row_of, x.v, b, head, i, real, zero)
    put(row(to.beta, b, head, i), dot(row_of, d, deep, zero) - dot(key, w, wide, zero))
    store_row(to.v, b, head, i, d, beta, True, zero)
    load_row(row_of, to.k, b, head, i, real, zero)  # D u
    if gate is not None:
        add(row_of, beta, w, wide, zero)
        multiply(row_of, row_of, key, wide, zero)
        load_row(crossing, x.q, b, head, i, real, zero)
        multiply(crossing, crossing, dq, wide, zero)
        add(crossing, -one, row_of, wide, zero)
        store_gate(to.gate, b, head, i, crossing, real, True, wide, zero)
        load_row(row_of, to.k, b, head, i, real, zero)
    add(row_of, -beta, w, wide, zero)
    store_row(to.k, b, head, i, row_of, one, True, zero)


@kernel
def sum_crossing(d_gate, mask, later, width, zero, b, head):
    """From what each token adds to the sums over all tokens from there on; zero where there is no token."""
    size = size_of(zero)
    if d_gate.width == 1:
        for c in range(1, width):
            put(later, get(later, zero) + get(later + c * size, zero))
    for i in range(d_gate.length - 1, -1, -1):
        for c in range(d_gate.width):
            at, sum_at = row(d_gate, b, head, i) + c * d_gate.by_column, later + c * size
            put(sum_at, get(sum_at, zero) + get(at, zero))
            put(at, get(sum_at, zero) if is_real(mask, b, i) else zero)
