"""What kernels over a piece are told, and where a lane's tokens, blocks and tiles lie. See `kernels` and `layout`."""

from typing import NamedTuple

import numpy as np

from attngap.ops.native.tensors import Rows
from attngap.ops.native.vectors import BYTES, get, kernel, size_of

WORD = np.int64(0)


class Inputs(NamedTuple):
    q: Rows
    k: Rows
    v: Rows
    fq: Rows
    fk: Rows
    gain: Rows  # (b, h, t, 1)
    past_k: Rows  # (b, h_kv, sinks + window, d), the ring that `state` describes
    past_v: Rows
    past_fk: Rows  # (b, h_kv, window, r)
    S: Rows
    z: Rows  # (b, h_kv, r, 1)
    seen: int  # address of (b,) int64: tokens before this piece
    lengths: int  # address of (b,) int64: real tokens of this piece
    tokens: int  # address of (b, t) int64: where they are; 0 if there is no padding
    skipped: int  # address of (h,) int64: not 0 for heads that nobody reads; 0 if all are read
    table: int  # address of the table that says how features come about (`kernels_call`); 0 if they are given


class Options(NamedTuple):
    window: int
    sinks: int
    sink_tiles: int
    band: int  # tiles
    scale: float
    relative: bool
    far: bool  # are there features
    given: bool  # is the near part there already
    parts: int  # in which the rows of a lane are computed, each by itself: for threads


class Results(NamedTuple):
    out: Rows
    S: Rows
    z: Rows


class Stats(NamedTuple):
    """What the backward needs of each row, (b, h, t, 1): its log-unit m, its normalizer n, and c."""

    unit: Rows
    norm: Rows
    coefficient: Rows


class Near(NamedTuple):
    """The near part of the rows, computed before: see `blocks.Near`."""

    out: Rows
    top: Rows
    log_mass: Rows


class Room(NamedTuple):
    """Offsets of the fields of scratch memory; sizes are in `compiled.forward_room`."""

    keys_t: int
    values: int  # the sinks, the band and, right behind them, S
    weights: int
    queries: int
    fq: int
    fk: int  # two tiles of features
    fk_t: int  # the same, transposed
    scores: int  # fq fk^T
    rows: int
    z: int
    tile: int  # one tile of keys, before it is transposed
    gains: int  # a number for each slot
    content: int  # a tile, turned back; from here on only where features are computed
    cosines: int
    sines: int
    fading: int
    query_weight: int  # for each head of the lane, and so the next two
    query_bias: int
    query_scale: int
    gain_weight: int
    key_weight: int
    key_bias: int
    rate: int
    end: int
    guard: int


class Lane(NamedTuple):
    """One sequence and key head, and where its tokens are."""

    b: int
    kv: int
    old_sinks: int
    new_sinks: int
    kept: int
    oldest: int  # the place of timeline token 0 in the ring
    total: int  # tokens of the timeline


class Block(NamedTuple):
    """Rows of the piece: `count` from `first` on, in the slots from `slot` on; `tile` is -1 for rows of new sinks."""

    tile: int
    slot: int
    first: int
    count: int


@kernel
def find_lane(x, o, lane):
    b, kv = lane // x.k.heads, lane % x.k.heads
    seen, length = get(x.seen + 8 * b, WORD), get(x.lengths + 8 * b, WORD)
    old_sinks = min(seen, o.sinks)
    new_sinks = min(o.sinks - old_sinks, length)
    kept = min(seen - old_sinks, o.window)
    return Lane(b, kv, old_sinks, new_sinks, kept, seen - old_sinks - kept, kept + length - new_sinks)


@kernel
def token(x, b, i):
    """Where real token i of the piece is."""
    if x.tokens == 0:
        return i
    return get(x.tokens + 8 * (b * x.q.length + i), WORD)


@kernel
def lanes_of(zero):
    return BYTES // size_of(zero)


@kernel
def far_tiles(o, j, zero):
    """The first tile of the band of block j, and how many of its tiles hold keys that are far for some row."""
    n = lanes_of(zero)
    first, last = j - o.band + 1, (j * n + n - 1 - o.window) // n
    return first, last - first + 1 if o.far and last >= 0 else 0


@kernel
def row_edges(o, lane, block, s):
    """Of the row in slot s: its number in the piece, its place on the timeline, and how many sinks it reads."""
    i = block.first + s - block.slot
    if i < lane.new_sinks:
        return i, -1, lane.old_sinks + i + 1
    return i, lane.kept + i - lane.new_sinks, lane.old_sinks + lane.new_sinks


@kernel
def is_skipped(x, head):
    return x.skipped != 0 and get(x.skipped + 8 * head, WORD) != 0


@kernel
def all_skipped(x, lane):
    """Is none of the heads of a lane read."""
    group, read = x.q.heads // x.k.heads, False
    for head in range(lane.kv * group, (lane.kv + 1) * group):
        read = read or not is_skipped(x, head)
    return not read


@kernel
def part_of(lane, part, parts, n):
    """The blocks of rows first <= j < last of one of the parts of a lane, and the first of all parts."""
    start, stop = lane.kept // n, -(-lane.total // n) if lane.total > lane.kept else 0
    count = max(0, stop - start)
    return start + count * part // parts, start + count * (part + 1) // parts, start


@kernel
def block_of(lane, j, n):
    """The rows of tile j of the timeline."""
    a = max(j * n, lane.kept)
    return Block(j, a - j * n, a - lane.kept + lane.new_sinks, min(j * n + n, lane.total) - a)
