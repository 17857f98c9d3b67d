"""Rotary positions taken back, compiled: as `mechanisms.rotary.Rotary.unrotate` does, a pair of channels at a time."""

from attngap.ops.hybrid.kernels_call import AT, IN, tensor, word
from attngap.ops.native.memory import row
from attngap.ops.native.vectors import get, kernel, put, size_of


@kernel
def invert_angles(table, b, at, cosines, sines, zero):
    """cos and minus sin of every pair of channels of token `at`, over the square of their length: what turns back."""
    step = word(table, IN.angle_step)
    invert(table, tensor(table, AT.cos), tensor(table, AT.sin), step, b, at, cosines, sines, zero)


@kernel
def invert(table, cos, sin, step, b, at, cosines, sines, zero):
    """The same from row `at` of other cos and sin, which hold an angle in every `step`th column."""
    size = size_of(zero)
    for i in range(word(table, IN.turned)):
        c = get(row(cos, b, 0, at) + i * step * cos.by_column, zero)
        s = get(row(sin, b, 0, at) + i * step * sin.by_column, zero)
        length = c * c + s * s
        put(cosines + i * size, c / length)
        put(sines + i * size, -s / length)


@kernel
def turn_pairs(table, content, cosines, sines, zero):
    """The channels of a query or key in `content` that positions turn, by the inverted angles."""
    size, pairs = size_of(zero), word(table, IN.turned)
    gap, step = (1, 2) if word(table, IN.adjacent) else (pairs, 1)
    for i in range(pairs):
        at = content + (word(table, IN.turned_first) + i * step) * size
        c, s = get(cosines + i * size, zero), get(sines + i * size, zero)
        one, two = get(at, zero), get(at + gap * size, zero)
        put(at, one * c - two * s)
        put(at + gap * size, two * c + one * s)
