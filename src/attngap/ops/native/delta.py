"""The delta rule and its gradients by token: S_i = g_i S_{i-1} + k_i u_i^T, u_i = beta_i (v_i - k_i^T g_i S_{i-1}).

Let D_i be the gradient of S_i, with what token i itself reads of it, and d_i = k_i^T D_i that of u_i. Backward in time

    D_{i-1} = g_i (D_i - beta_i k_i d_i^T) + q_{i-1} d_out_{i-1}^T,    dv_i = beta_i d_i

and with w_i = g_i S_{i-1} d_i, which needs the state once more, forward in time

    dq_i = S_i d_out_i,    dk_i = D_i u_i - beta_i w_i,    d beta_i = v_i . d_i - k_i . w_i

A decay scales whatever crosses it, so d log g_i is the sum of q_j * dq_j - k_j * (D_j u_j + beta_j w_j) over j >= i,
channel by channel, plus what the last state carries out. u_i is kept by the forward pass; d_i and D_i u_i wait for
the second pass of the backward in the rows of dv and dk.

`gate` is log g as (b, ., t, 1 or r), or None. `scratch` is the address of zeros: `BUFFERS` pairs of buffers, then two
states.
"""

from typing import NamedTuple

from attngap.ops.native.linear import carried_out, give_gate, is_there
from attngap.ops.native.memory import (
    Rows,
    add,
    ask,
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
from attngap.ops.native.vectors import get, kernel, like_size, number, put

BUFFERS = 12


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


class Grads(NamedTuple):
    q: Rows
    k: Rows
    v: Rows
    beta: Rows
    gate: Rows | None
    S: Rows


@kernel
def forward(x, gate, kept, to, like, scratch, first, last):
    """Lanes first <= b * h < last; u goes to `kept`, (b, h, t, dv), unless it is None."""
    h, t, one, size = x.q.heads, x.q.length, number(1, like), like_size(like)
    pitch, width = padded(max(x.q.width, x.v.width), size), padded(x.v.width, size)
    queries, keys, us, rows = scratch, scratch + 2 * pitch, scratch + 4 * pitch, scratch + 6 * pitch
    gates, state = None if gate is None else scratch + 12 * pitch, scratch + 2 * BUFFERS * pitch
    for lane in range(first, last):
        b, head = lane // h, lane % h
        held = head * x.S.heads // h
        enter(state, x.S, b, held, False, like)
        for i in range(0, t, 2):
            for s in range(2):
                at = min(i + s, t - 1)
                take(queries + s * pitch, x.q, b, head, at, at == i + s and is_there(x.mask, b, at), like)
            correct(state, x, gate, b, head, i, pitch, like, scratch)
            turn(state, x.q.width, width, keys, us, queries, rows, gates, None, pitch, like)
            for s in range(min(2, t - i)):
                give(to.out, b, head, i + s, rows + s * pitch, one, True, like)
                if kept is not None:
                    give(kept, b, head, i + s, us + s * pitch, one, True, like)
        if head * x.S.heads % h == 0:
            leave(to.S, b, held, state, True, like)


@kernel
def correct(state, x, gate, b, head, i, pitch, like, scratch):
    """Keys, u and gates of tokens i and i + 1 in buffers 1, 2 and 6, by way of buffers 4 and 5; the state stays."""
    h, t, width = x.q.heads, x.k.length, padded(x.v.width, like_size(like))
    keys, us, asked, found = scratch + 2 * pitch, scratch + 4 * pitch, scratch + 8 * pitch, scratch + 10 * pitch
    gates, kv = None if gate is None else scratch + 12 * pitch, head * x.k.heads // h
    for s in range(2):
        at, here = min(i + s, t - 1), s * pitch
        there = at == i + s and is_there(x.mask, b, at)
        take(keys + here, x.k, b, kv, at, there, like)
        take(us + here, x.v, b, kv, at, there, like)
        spread(asked + here, number(1, like), keys + here, pitch, like)
        if gate is not None:
            take_gate(gates + here, gate, b, head * gate.heads // h, at, there, pitch, like)
            multiply(asked + here, asked + here, gates + here, pitch, like)
    between = dot(asked + pitch, keys, pitch, like)  # what token 1 finds of token 0
    if gate is not None:
        multiply(asked + pitch, asked + pitch, gates, pitch, like)
    ask(state, x.k.width, width, asked, found, pitch, like)
    for s in range(2):
        here = s * pitch
        add(us + here, number(-1, like), found + here, width, like)
        if s == 1:
            add(us + pitch, -between, us, width, like)
        spread(us + here, strength(x, b, head * x.beta.heads // h, i + s, like), us + here, width, like)


@kernel
def strength(x, b, head, i, like):
    """Beta; 0 where there is no token."""
    return get(row(x.beta, b, head, i), like) if 0 <= i < x.beta.length and is_there(x.mask, b, i) else like


@kernel
def backward(x, gate, u, above, to, like, scratch, first, last):
    """Lanes first <= b * h < last; `above` holds the gradients of the results."""
    for lane in range(first, last):
        b, head = lane // x.q.heads, lane % x.q.heads
        go_back(x, gate, u, above, to, like, scratch, b, head)
        go_forward(x, gate, u, above, to, like, scratch, b, head)


@kernel
def go_back(x, gate, u, above, to, like, scratch, b, head):
    """d in the rows of dv, D u in those of dk; the gradient of the first state. A token takes both turns of a pair."""
    t, one, size = x.q.length, number(1, like), like_size(like)
    pitch, wide, deep = padded(max(x.q.width, x.v.width), size), padded(x.q.width, size), padded(x.v.width, size)
    keys, unused, asked, found = scratch + 2 * pitch, scratch + 6 * pitch, scratch + 8 * pitch, scratch + 10 * pitch
    written, values, read = scratch + 14 * pitch, scratch + 16 * pitch, scratch + 18 * pitch
    gates, D = None if gate is None else scratch + 12 * pitch, scratch + 2 * BUFFERS * pitch
    E = D + x.q.width * deep
    enter(D, above.S, b, head, False, like)
    enter(E, above.S, b, head, True, like)
    clear(asked, 2 * pitch, like)
    clear(read, 2 * pitch, like)
    if gate is not None:
        take_gate(gates + pitch, gate, b, head, 0, False, pitch, like)
    for i in range(t - 1, -1 if gate is None else -2, -1):
        at = max(i, 0)
        there = at == i and is_there(x.mask, b, at)
        take(written, x.q, b, head, at, there, like)
        take(keys, x.k, b, head, at, there, like)
        take(values, above.out, b, head, at, there, like)
        take(read, u, b, head, at, there, like)
        spread(asked, one, keys, pitch, like)
        if gate is not None:  # the gate between this token and the one after it
            after = min(i + 1, t - 1)
            take_gate(gates, gate, b, head, after, after == i + 1 and is_there(x.mask, b, after), pitch, like)
            multiply(asked, asked, gates, pitch, like)
        ask(D, x.q.width, deep, asked, found, pitch, like)
        spread(values + pitch, one, found, deep, like)
        add(values + pitch, dot(keys, written, wide, like), values, deep, like)  # d
        spread(written + pitch, -strength(x, b, head, i, like), keys, pitch, like)
        turn(D, x.q.width, deep, written, values, written, unused, gates, None, pitch, like)
        turn(E, x.v.width, wide, values, written, read, found, None, gates, pitch, like)
        if i >= 0:
            give(to.k, b, head, i, found, one, True, like)
            give(to.v, b, head, i, values + pitch, one, True, like)
    leave(to.S, b, head, D, True, like)


@kernel
def go_forward(x, gate, u, above, to, like, scratch, b, head):
    """Everything else, with the transposed state. A token takes both turns of a pair: to read, to write and read."""
    t, size = x.q.length, like_size(like)
    pitch, wide = padded(max(x.q.width, x.v.width), size), padded(x.q.width, size)
    later, found, written, values = (
        scratch + 6 * pitch,
        scratch + 10 * pitch,
        scratch + 14 * pitch,
        scratch + 16 * pitch,
    )
    read, keys, gates = scratch + 18 * pitch, scratch + 17 * pitch, None if gate is None else scratch + 12 * pitch
    turned = scratch + 2 * BUFFERS * pitch
    enter(turned, x.S, b, head, True, like)
    clear(written, 2 * pitch, like)
    clear(values, 2 * pitch, like)
    if gate is not None:
        take_gate(gates + pitch, gate, b, head, 0, False, pitch, like)
    for i in range(t):
        there = is_there(x.mask, b, i)
        take(written + pitch, u, b, head, i, there, like)
        take(keys, x.k, b, head, i, there, like)  # the values of the second turn
        take(read, to.v, b, head, i, there, like)
        take(read + pitch, above.out, b, head, i, there, like)
        if gate is not None:
            take_gate(gates, gate, b, head, i, there, pitch, like)
        turn(turned, x.v.width, wide, written, values, read, found, None, gates, pitch, like)  # w, then dq
        finish(x, gate, to, keys, read, found, found + pitch, like, scratch, b, head, i)
    if gate is not None:
        clear(later, pitch, like)
        carried_out(later, turned, above.S, b, head, like)
        sum_crossing(to.gate, x.mask, later, x.q.width, like, b, head)


@kernel
def finish(x, gate, to, key, d, w, dq, like, scratch, b, head, i):
    """The gradients of token i; the one of the gate becomes what the token adds to the sum."""
    one, size = number(1, like), like_size(like)
    pitch, wide, deep = padded(max(x.q.width, x.v.width), size), padded(x.q.width, size), padded(x.v.width, size)
    there, beta = is_there(x.mask, b, i), strength(x, b, head, i, like)
    row_of, crossing = scratch + 22 * pitch, scratch + 20 * pitch
    give(to.q, b, head, i, dq, one, True, like)
    take(row_of, x.v, b, head, i, there, like)
    put(row(to.beta, b, head, i), dot(row_of, d, deep, like) - dot(key, w, wide, like))
    give(to.v, b, head, i, d, beta, True, like)
    take(row_of, to.k, b, head, i, there, like)  # D u
    if gate is not None:
        add(row_of, beta, w, wide, like)
        multiply(row_of, row_of, key, wide, like)
        take(crossing, x.q, b, head, i, there, like)
        multiply(crossing, crossing, dq, wide, like)
        add(crossing, -one, row_of, wide, like)
        give_gate(to.gate, b, head, i, crossing, there, True, wide, like)
        take(row_of, to.k, b, head, i, there, like)
    add(row_of, -beta, w, wide, like)
    give(to.k, b, head, i, row_of, one, True, like)


@kernel
def sum_crossing(d_gate, mask, later, width, like, b, head):
    """From what each token adds to the sums over all tokens from there on; zero where there is no token."""
    size = like_size(like)
    if d_gate.width == 1:
        for c in range(1, width):
            put(later, get(later, like) + get(later + c * size, like))
    for i in range(d_gate.length - 1, -1, -1):
        for c in range(d_gate.width):
            at, sum_at = row(d_gate, b, head, i) + c * d_gate.by_column, later + c * size
            put(sum_at, get(sum_at, like) + get(at, like))
            put(at, get(sum_at, like) if is_there(mask, b, i) else like)
