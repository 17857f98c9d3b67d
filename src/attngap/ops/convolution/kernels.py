"""A short causal convolution of each channel with SiLU, and its gradients: y_i = silu(a_i), a_i = sum_j taps_j x_{i-j}.

With s = sigmoid(a), da = dy s (1 + a (1 - s)); then dx_i = sum_j taps_j da_{i+j} and dtaps_j = sum_i da_i x_{i-j}.
A lane is a vector of channels of a sequence. Going backward in time the last da wait in a ring as long as the taps, so
each row is read and written once.

`scratch` is the address of a ring of rows and of as many sums.
"""

from typing import NamedTuple

from attngap.ops.native.memory import clear, row
from attngap.ops.native.tensors import Rows
from attngap.ops.native.vectors import BYTES, exp, fma, kernel, load, number, over, plus, size_of, splat, store, times


class Inputs(NamedTuple):
    x: Rows  # (b, 1, t, c), channels next to each other and a multiple of a vector
    taps: Rows  # (1, 1, n, c)


class ConvolutionGradRows(NamedTuple):
    x: Rows
    taps: Rows  # (b, 1, n, c), of each sequence


@kernel
def forward(x, out, zero, scratch, first, last):
    """Lanes first <= b * vectors < last."""
    vectors = x.x.width * size_of(zero) // BYTES
    for b in range(first // vectors, -(-last // vectors)):
        start, stop = max(first - b * vectors, 0) * BYTES, min(last - b * vectors, vectors) * BYTES
        for i in range(x.x.length):
            taps, rows, to = row(x.taps, 0, 0, 0), row(x.x, b, 0, i), row(out, b, 0, i)
            for c in range(start, stop, BYTES):
                a = convolved(taps + c, x.taps.by_row, rows + c, x.x.by_row, min(x.taps.length, i + 1), zero)
                store(to + c, times(a, sigmoid(a, zero)))


@kernel
def backward(x, d_out, to, zero, scratch, first, last):
    vectors, n, one = x.x.width * size_of(zero) // BYTES, x.taps.length, splat(number(1, zero))
    width = vectors * BYTES
    ring, sums = scratch, scratch + n * width
    for b in range(first // vectors, -(-last // vectors)):
        start, stop = max(first - b * vectors, 0) * BYTES, min(last - b * vectors, vectors) * BYTES
        clear(scratch, 2 * n * width, zero)
        at = 0  # of token i in the ring; those after it follow
        for i in range(x.x.length - 1, -1, -1):
            at = at - 1 if at else n - 1
            taps, rows = row(x.taps, 0, 0, 0), row(x.x, b, 0, i)
            above, below = row(d_out, b, 0, i), row(to.x, b, 0, i)
            for c in range(start, stop, BYTES):
                a = convolved(taps + c, x.taps.by_row, rows + c, x.x.by_row, min(n, i + 1), zero)
                s = sigmoid(a, zero)
                slope = times(s, fma(a, plus(one, times(splat(number(-1, zero)), s)), one))
                da = times(load(above + c, zero), slope)
                store(ring + at * width + c, da)
                for j in range(min(n, i + 1)):
                    sum_at = sums + j * width + c
                    store(sum_at, fma(da, load(rows - j * x.x.by_row + c, zero), load(sum_at, zero)))
                dx, place = splat(zero), at
                for j in range(n):
                    dx = fma(load(taps + j * x.taps.by_row + c, zero), load(ring + place * width + c, zero), dx)
                    place = place + 1 if place + 1 < n else 0
                store(below + c, dx)
        for j in range(n):
            for c in range(start, stop, BYTES):
                store(row(to.taps, b, 0, j) + c, load(sums + j * width + c, zero))


@kernel
def convolved(taps, by_tap, rows, by_row, count, zero):
    found = splat(zero)
    for j in range(count):
        found = fma(load(taps + j * by_tap, zero), load(rows - j * by_row, zero), found)
    return found


@kernel
def sigmoid(a, zero):
    one = splat(number(1, zero))
    return over(one, plus(one, exp(times(splat(number(-1, zero)), a))))
