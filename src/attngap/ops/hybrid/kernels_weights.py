"""From logits and features to the weights of a row: which keys are near, one unit and one normalizer for all."""

import math

from attngap.ops.exponent import LIMITS, MASSLESS
from attngap.ops.hybrid.kernels_layout import lanes_of, row_edges, token
from attngap.ops.hybrid.kernels_rows import clear, dot, scale_row
from attngap.ops.native.memory import padded, row, safe
from attngap.ops.native.vectors import (
    BYTES,
    between,
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
    splat,
    store,
    total,
)


@kernel
def combine(top, lift, mass, zero):
    """The unit m of a row and the weight c of its features in it, by the rule of `blocks.combine`."""
    least, most, smallest = LIMITS[0] if size_of(zero) == 4 else LIMITS[1]
    unit = top
    if mass != zero:
        unit = max(top, number(math.log(abs(mass)), zero) + lift)
    else:
        most = MASSLESS
    c = number(math.exp(min(max(lift - unit, number(least, zero)), number(most, zero))), zero)
    return unit, c if c > number(smallest, zero) else zero


@kernel
def mask_logits(o, lane, block, weights, a, sinks, zero):
    """-inf where a key is not near the row; the largest logit of those that are."""
    n, hidden = lanes_of(zero), splat(number(-math.inf, zero))
    best = hidden
    empty = o.sink_tiles * n - lane.old_sinks - lane.new_sinks
    for t in range(o.sink_tiles):
        x = between(load(weights + t * BYTES, zero), empty - t * n, empty + sinks - t * n, hidden)
        store(weights + t * BYTES, x)
        best = larger(x, best)
    for slot in range(o.band):
        u, at = block.tile - (block.tile - slot) % o.band, weights + (o.sink_tiles + slot) * BYTES
        x = between(load(at, zero), a - o.window + 1 - u * n, a + 1 - u * n, hidden) if u >= 0 else hidden
        store(at, x)
        best = larger(x, best)
    return largest(best)


@kernel
def mask_scores(o, scores, first, tiles, a, zero):
    """Zero where a key is not far from the row; the sum of the others."""
    n, none = lanes_of(zero), splat(zero)
    sums = none
    for t in range(tiles):
        x = between(load(scores + t * BYTES, zero), 0, a - o.window + 1 - (first + t) * n, none)
        store(scores + t * BYTES, x)
        sums = plus(sums, x)
    return total(sums)


@kernel
def weigh_near(weights, columns, unit, zero):
    """exp(logit - m) in place, and the sum."""
    shift, sums = splat(-unit), splat(zero)
    for c in range(0, columns * BYTES, BYTES):
        x = exp(plus(load(weights + c, zero), shift))
        store(weights + c, x)
        sums = plus(sums, x)
    return total(sums)


@kernel
def finish_row(x, o, near, lane, block, head, first, tiles, s, stats, room, scratch, zero):
    """From logits and scores to weights that sum to one."""
    size = size_of(zero)
    fp, columns = padded(x.fq.width, size), o.sink_tiles + o.band
    wp = columns * BYTES + fp
    weights, fq, scores = (
        scratch + room.weights + s * wp,
        scratch + room.fq + s * fp,
        scratch + room.scores + s * 2 * BYTES,
    )
    i, a, sinks = row_edges(o, lane, block, s)
    at = token(x, lane.b, i)
    if not o.given:
        top = mask_logits(o, lane, block, weights, a, sinks, zero)
    else:
        top = get(row(near.top, lane.b, head, at), zero)
    mass = zero
    if o.far:
        mass = dot(fq, scratch + room.z, fp, zero) + mask_scores(o, scores, first, tiles, a, zero)
    gain = get(scratch + room.gains + s * size, zero)
    unit, c = combine(top, gain + top if o.relative else gain, mass, zero)
    if not o.given:
        share = weigh_near(weights, columns, unit, zero)
    else:
        clear(weights, columns * BYTES, zero)
        least = number(LIMITS[0][0] if size == 4 else LIMITS[1][0], zero)
        share = number(math.exp(max(get(row(near.log_mass, lane.b, head, at), zero) - unit, least)), zero)
    norm = share + mass * c
    factor = number(1, zero) / safe(norm, zero)
    put(row(stats.unit, lane.b, head, at), unit)
    put(row(stats.norm, lane.b, head, at), norm)
    put(row(stats.coefficient, lane.b, head, at), c)
    if not o.given:
        scale_row(weights, factor, weights, columns * BYTES, zero)
    if o.far:
        lift = splat(c * factor)
        for t in range(tiles):
            place = weights + (o.sink_tiles + (first + t) % o.band) * BYTES
            store(place, fma(lift, load(scores + t * BYTES, zero), load(place, zero)))
        scale_row(weights + columns * BYTES, c * factor, fq, fp, zero)
    return share * factor
