"""The table that tells a compiled step of decoding all it needs: one address instead of hundreds of arguments.

A table of 64-bit words: first nine for each tensor, as `Rows` has them, then single words and numbers. What stays the
same from token to token is written once (`call.TokenCall`). An address of 0 means that there is no such tensor.
"""

from typing import NamedTuple

import numpy as np

from attngap.ops.native.tensors import Rows
from attngap.ops.native.vectors import get, kernel, number

WORD, FLAG, DOUBLE = np.int64(0), np.uint8(0), np.float64(0)
FIELDS = len(Rows._fields)
OVERLAPS, INFINITE = 1, 2  # what the table says after a call: nothing was computed; an output is not finite


class Tensors(NamedTuple):
    """Where in the table a tensor is described."""

    q: int  # (b, h, 1, d), and so on with the key heads
    k: int
    v: int
    out: int
    cos: int  # (b, 1, 1, w): the rotary positions of the token
    sin: int
    real: int  # (b, 1, 1, 1) bytes: is the token no padding
    allowed: int  # (b, 1, n, 1) bytes: which keys of the cache may be read
    keys: int  # (b, groups, n, d): the cache of heads that are kept, this token included
    values: int
    state_k: int
    state_v: int
    state_fk: int  # not there where features are computed when a key leaves
    state_cos: int  # (b, 1, window + 1, pairs): what turned the last keys, token p in row p % (window + 1)
    state_sin: int
    S: int
    z: int  # (b, h_kv, r, 1)
    fq: int  # features and gain, where they are given
    fk: int  # of the new token, or of the one that leaves where the state holds no features
    gain: int  # (b, h, 1, 1)
    query_weight: int  # (1, h, d, r): the parameters of prototypes, where features are computed
    query_bias: int  # (1, h, 1, r)
    query_scale: int
    key_weight: int
    key_bias: int
    log_rate: int
    log_gain: int  # (1, h, 1, 1)
    gain_weight: int  # (1, h, 1, d)


class Words(NamedTuple):
    """Where in the table a single word is."""

    count: int  # address of (b,) int64: tokens in the state before this one
    position: int  # address of (b,) int64: the position that features see
    place: int  # address of (h,) int64: where in the cache a head's keys are, -1 for heads that are not kept
    held: int  # address of (h_kv,) int64: where in the state a key head is, -1 for none; 0: all in order
    window: int
    sinks: int
    relative: int
    appends: int  # is this token still to be written to the cache
    moves: int  # are count and position to be moved on
    reach: int  # the first position whose queries do not read features
    turned: int  # pairs of channels to be turned back; 0 for none
    turned_first: int  # the first channel of them
    adjacent: int  # are the channels of a pair neighbors
    angle_step: int  # from one angle to the next in cos and sin
    status: int  # 0, OVERLAPS or INFINITE
    scale: int  # the others are float64
    largest_scale: int  # of a query's features, as an exponent
    largest_size: int  # of a key's features, as an exponent
    fastest: int  # rate of fading
    faded: int  # the most that fades, as an exponent


class Room(NamedTuple):
    """Offsets of the fields of scratch memory; sizes are in `call.token_room`."""

    query: int  # HEADS rows, scaled
    content: int  # a query or key, turned back
    cosines: int
    sines: int
    fading: int  # exponents of the features' fading
    parameters: int
    fk: int
    fq: int  # HEADS rows
    row: int
    weights: int  # HEADS rows of BLOCK
    values: int  # BLOCK rows, where they must be copied
    result: int  # HEADS rows
    top: int  # a number for each of HEADS, as the next one
    norm: int
    end: int
    guard: int


AT, IN, ROOM = Tensors._make(range(28)), Words._make(range(20)), Room._make(range(16))
WORDS_AT = FIELDS * len(AT)
ROOM_AT = WORDS_AT + len(IN)
LENGTH = ROOM_AT + len(ROOM)
HEADS = 8  # that are computed together: as many rows as a tile of a product has
BLOCK = 128  # keys at a time


@kernel
def tensor(table, place):
    at = table + 8 * FIELDS * place
    return Rows(
        get(at, WORD),
        get(at + 8, WORD),
        get(at + 16, WORD),
        get(at + 24, WORD),
        get(at + 32, WORD),
        get(at + 40, WORD),
        get(at + 48, WORD),
        get(at + 56, WORD),
        get(at + 64, WORD),
    )


@kernel
def there(table, place):
    return get(table + 8 * FIELDS * place, WORD) != 0


@kernel
def width(table, place):
    return get(table + 8 * (FIELDS * place + 4), WORD)


@kernel
def word(table, place):
    return get(table + 8 * (WORDS_AT + place), WORD)


@kernel
def held_head(table, kv):
    """Where in the state a key head is; negative where it has none."""
    at = word(table, IN.held)
    return get(at + 8 * kv, WORD) if at != 0 else WORD + kv


@kernel
def value(table, place, zero):
    return number(get(table + 8 * (WORDS_AT + place), DOUBLE), zero)


@kernel
def field(table, scratch, place):
    """The address of a field of scratch memory."""
    return scratch + get(table + 8 * (ROOM_AT + place), WORD)
