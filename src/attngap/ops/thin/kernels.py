"""out = x W^T + bias for a few rows x: one walk through the memory of W, four rows side by side.

Where a core waits for memory, four places at once are read up to a fifth faster than one, and four sums keep the
additions from waiting for each other. The rows stay in cache while they meet every x. Rows are whole vectors.
"""

from typing import NamedTuple

from attngap.ops.native.vectors import (
    BYTES,
    exp,
    fma,
    get,
    kernel,
    load,
    load_half,
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

SIDE = 4  # rows of the weight side by side


class GatedRoom(NamedTuple):
    """Offsets of what stands between the products, all rows of it."""

    opened: int
    raised: int
    end: int
    guard: int


@kernel
def weights(at, c, zero, halved):
    """A vector of a weight's row, c bytes of x from its start; widened where the weight is in bfloat16."""
    if halved is None:
        return load(at + c, zero)
    return load_half(at + c // 2, zero)


@kernel
def multiply(weight, bias, x, out, rows, width, outputs, halved, zero, scratch, first, last):
    """Outputs first to last of weight (outputs, width) and x (rows, width), given by addresses of tensors without gaps.

    A bias at 0 is none. With `halved` the weight is in bfloat16 and all else in float32.
    """
    size = size_of(zero)
    by_row = width * size
    by_output = by_row if halved is None else by_row // 2
    whole = first + (last - first) // SIDE * SIDE
    for o in range(first, whole, SIDE):
        at, added = weight + o * by_output, 0 if bias == 0 else bias + o * size
        for r in range(rows):
            four(at, by_output, added, x + r * by_row, out + (r * outputs + o) * size, by_row, halved, zero)
    for o in range(whole, last):
        start = zero if bias == 0 else get(bias + o * size, zero)
        for r in range(rows):
            s, to = splat(zero), x + r * by_row
            for c in range(0, by_row, BYTES):
                s = fma(weights(weight + o * by_output, c, zero, halved), load(to + c, zero), s)
            put(out + (r * outputs + o) * size, start + total(s))


@kernel
def four(at, by_output, bias, x, out, by_row, halved, zero):
    """As many outputs of one x: of rows of the weight from `at` on, added to as many numbers of the bias."""
    size = size_of(zero)
    s, t, u, v = splat(zero), splat(zero), splat(zero), splat(zero)
    second, third, fourth = at + by_output, at + 2 * by_output, at + 3 * by_output
    for c in range(0, by_row, BYTES):
        here = load(x + c, zero)
        s = fma(weights(at, c, zero, halved), here, s)
        t = fma(weights(second, c, zero, halved), here, t)
        u = fma(weights(third, c, zero, halved), here, u)
        v = fma(weights(fourth, c, zero, halved), here, v)
    sums = total(s), total(t), total(u), total(v)
    for i in range(SIDE):
        start = zero if bias == 0 else get(bias + i * size, zero)
        put(out + i * size, start + sums[i])


@kernel
def gated(gate, up, down, x, out, rows, width, middle, outputs, room, zero, scratch, first, last):
    """Outputs first to last of down(silu(gate(x)) * up(x)); gate, up and down are addresses of a weight and a bias."""
    if first >= last:
        return
    size, one, none = size_of(zero), splat(number(1, zero)), splat(zero)
    opened, raised = scratch + room.opened, scratch + room.raised
    multiply(gate[0], gate[1], x, opened, rows, width, middle, None, zero, scratch, 0, middle)
    multiply(up[0], up[1], x, raised, rows, width, middle, None, zero, scratch, 0, middle)
    for c in range(0, rows * middle * size, BYTES):
        here = load(opened + c, zero)
        share = over(here, plus(one, exp(fma(splat(number(-1, zero)), here, none))))
        store(raised + c, times(share, load(raised + c, zero)))
    multiply(down[0], down[1], raised, out, rows, middle, outputs, None, zero, scratch, first, last)
