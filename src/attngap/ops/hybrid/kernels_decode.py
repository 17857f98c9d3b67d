"""One token of all heads of a layer, compiled; the state is updated in place.

A lane is a key head of a sequence. The token in the slot of the new one leaves the window and joins S and z, by
features that the state holds, or else that are computed now. Then the query heads that share the key head read sinks
and window together, in the order of their slots, which does not matter, and the sums. Heads that are kept exact read
their whole cache instead. See `state` for the slots.

Keys are read once for all heads that share them: a row meets every query while it is near. Values are a product of
matrices. Both go by blocks, with a running maximum, so that scratch memory does not grow with the cache.
"""

import math

from attngap.ops.hybrid.kernels_call import (
    AT,
    BLOCK,
    FLAG,
    HEADS,
    IN,
    INFINITE,
    OVERLAPS,
    ROOM,
    ROOM_AT,
    WORD,
    WORDS_AT,
    field,
    held_head,
    tensor,
    there,
    value,
    width,
    word,
)
from attngap.ops.hybrid.kernels_features import (
    computed,
    key_features,
    load_angles,
    load_fading,
    load_old_angles,
    query_features,
    query_gain,
    turn_back,
)
from attngap.ops.hybrid.kernels_rows import add, clear, dot, load_row, scale_row, set_row
from attngap.ops.hybrid.kernels_weights import combine
from attngap.ops.native.memory import padded, row, safe
from attngap.ops.native.products import multiply_matrices
from attngap.ops.native.vectors import (
    BYTES,
    called_kernel,
    exp,
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
def whole(x, zero):
    """Are its rows whole vectors without gaps."""
    return x.by_column == size_of(zero) and x.width * size_of(zero) == padded(x.width, size_of(zero))


@kernel
def find(buffer, x, b, head, i, zero):
    """The address of a row of whole vectors: where it is, or of a copy."""
    if whole(x, zero):
        return row(x, b, head, i)
    load_row(buffer, x, b, head, i, zero)
    return buffer


@called_kernel
def push(table, scratch, b, kv, count, zero):
    """The new token takes its slot; the one that had it joins the sums."""
    window, sinks, size = word(table, IN.window), word(table, IN.sinks), size_of(zero)
    K, V, F = tensor(table, AT.state_k), tensor(table, AT.state_v), tensor(table, AT.state_fk)
    full, held = sinks + window, held_head(table, kv)
    slot = count if count < full else sinks + (count - sinks) % window
    buffer = field(table, scratch, ROOM.result)
    if count >= full:
        S, z = tensor(table, AT.S), tensor(table, AT.z)
        left = find(field(table, scratch, ROOM.row), V, b, held, slot, zero)
        vp = padded(V.width, size)
        features, by = field(table, scratch, ROOM.fk), size
        if there(table, AT.state_fk):
            features, by = row(F, b, held, slot - sinks), F.by_column
        for c in range(S.length):
            feature = get(features + c * by, zero)
            if feature != zero:
                sums = find(buffer, S, b, held, c, zero)
                add(sums, feature, left, vp, zero)
                if sums == buffer:
                    set_row(S, b, held, c, buffer, number(1, zero), zero)
            place = row(z, b, held, c)
            put(place, get(place, zero) + feature)
    load_row(buffer, tensor(table, AT.k), b, kv, 0, zero)
    set_row(K, b, held, slot, buffer, number(1, zero), zero)
    load_row(buffer, tensor(table, AT.v), b, kv, 0, zero)
    set_row(V, b, held, slot, buffer, number(1, zero), zero)
    if slot >= sinks and there(table, AT.state_fk):
        set_row(F, b, held, slot - sinks, field(table, scratch, ROOM.fk), number(1, zero), zero)


@called_kernel
def append(table, scratch, b, kv, place, zero):
    """The new token at the end of the cache."""
    buffer, keys, values = field(table, scratch, ROOM.result), tensor(table, AT.keys), tensor(table, AT.values)
    load_row(buffer, tensor(table, AT.k), b, kv, 0, zero)
    set_row(keys, b, place, keys.length - 1, buffer, number(1, zero), zero)
    load_row(buffer, tensor(table, AT.v), b, kv, 0, zero)
    set_row(values, b, place, values.length - 1, buffer, number(1, zero), zero)


@called_kernel
def logits(table, scratch, keys, b, place, start, count, heads, zero):
    """Of `count` keys from `start` on, into the rows of `weights`; -inf up to whole vectors after them."""
    size, kp, wp = size_of(zero), padded(keys.width, size_of(zero)), BLOCK * size_of(zero)
    query, weights = field(table, scratch, ROOM.query), field(table, scratch, ROOM.weights)
    for i in range(count):
        key = find(field(table, scratch, ROOM.row), keys, b, place, start + i, zero)
        for h in range(heads):
            put(weights + h * wp + i * size, dot(query + h * kp, key, kp, zero))
    for i in range(count, -(-count * size // BYTES) * BYTES // size):
        for h in range(heads):
            put(weights + h * wp + i * size, number(-math.inf, zero))


@called_kernel
def hide(table, scratch, b, start, count, heads, zero):
    """-inf for keys that may not be read."""
    allowed, size = tensor(table, AT.allowed), size_of(zero)
    for i in range(count):
        if get(row(allowed, b, 0, start + i), FLAG) == 0:
            for h in range(heads):
                put(field(table, scratch, ROOM.weights) + (h * BLOCK + i) * size, number(-math.inf, zero))


@called_kernel
def weigh(table, scratch, count, h, vp, zero):
    """exp(logit - largest so far) in place; what was read before is measured anew."""
    size = size_of(zero)
    weights = field(table, scratch, ROOM.weights) + h * BLOCK * size
    top, norm = field(table, scratch, ROOM.top) + h * size, field(table, scratch, ROOM.norm) + h * size
    result = field(table, scratch, ROOM.result) + h * vp
    best = splat(get(top, zero))
    for c in range(0, count * size, BYTES):
        best = larger(load(weights + c, zero), best)
    found = largest(best)
    if found > get(top, zero):
        factor = number(math.exp(get(top, zero) - found), zero)
        scale_row(result, factor, result, vp, zero)
        put(norm, get(norm, zero) * factor)
        put(top, found)
    shift, sums = splat(-get(top, zero) if get(top, zero) > number(-math.inf, zero) else zero), splat(zero)
    for c in range(0, count * size, BYTES):
        x = exp(plus(load(weights + c, zero), shift))
        store(weights + c, x)
        sums = plus(sums, x)
    put(norm, get(norm, zero) + total(sums))


@called_kernel
def add_weighted(table, scratch, weights, by_weights, x, b, head, start, count, zero):
    """`result` of every head <- itself + its weights times `count` rows of a tensor, at most BLOCK."""
    size = size_of(zero)
    result, vp = field(table, scratch, ROOM.result), padded(x.width, size)
    at, by = row(x, b, head, start), x.by_row
    if not whole(x, zero):
        at, by = field(table, scratch, ROOM.values), vp
        for i in range(count):
            load_row(at + i * by, x, b, head, start + i, zero)
    multiply_matrices(result, vp, HEADS, vp, weights, by_weights, size, at, by, count, True, zero)


@called_kernel
def read_rows(table, scratch, keys, values, b, place, count, masked, heads, zero):
    """Softmax of the queries over rows of keys: `result`, with `top` and `norm` of every head."""
    size, vp = size_of(zero), padded(values.width, size_of(zero))
    clear(field(table, scratch, ROOM.result), HEADS * vp, zero)
    clear(field(table, scratch, ROOM.norm), BYTES, zero)
    for h in range(heads):
        put(field(table, scratch, ROOM.top) + h * size, number(-math.inf, zero))
    for start in range(0, count, BLOCK):
        some = min(BLOCK, count - start)
        logits(table, scratch, keys, b, place, start, some, heads, zero)
        if masked:
            hide(table, scratch, b, start, some, heads, zero)
        for h in range(heads):
            weigh(table, scratch, some, h, vp, zero)
        weights = field(table, scratch, ROOM.weights)
        add_weighted(table, scratch, weights, BLOCK * size, values, b, place, start, some, zero)


@called_kernel
def far_part(table, scratch, b, held, head, h, zero):
    """Features of a head into row h of `fq`, times what they weigh beside what it has read near."""
    size, z = size_of(zero), tensor(table, AT.z)
    fp, vp = padded(z.length, size), padded(width(table, AT.v), size)
    fq, mass = field(table, scratch, ROOM.fq) + h * fp, zero
    if computed(table):
        turn_back(table, scratch, tensor(table, AT.q), b, head, 0, zero)
        query_features(table, scratch, head, fq, zero)
    else:
        load_row(fq, tensor(table, AT.fq), b, head, 0, zero)
    for c in range(z.length):
        mass += get(fq + c * size, zero) * get(row(z, b, held, c), zero)
    gain = query_gain(table, scratch, b, head, zero)
    top, norm = field(table, scratch, ROOM.top) + h * size, field(table, scratch, ROOM.norm) + h * size
    unit, lift = combine(get(top, zero), gain + get(top, zero) if word(table, IN.relative) else gain, mass, zero)
    near = number(math.exp(get(top, zero) - unit), zero)
    result = field(table, scratch, ROOM.result) + h * vp
    scale_row(result, near, result, vp, zero)
    scale_row(fq, lift, fq, fp, zero)
    put(norm, get(norm, zero) * near + mass * lift)


@called_kernel
def read_sums(table, scratch, b, held, zero):
    """What the features of the heads read of S joins `result`."""
    S, size = tensor(table, AT.S), size_of(zero)
    for start in range(0, S.length, BLOCK):
        weights = field(table, scratch, ROOM.fq) + start * size
        some = min(BLOCK, S.length - start)
        add_weighted(table, scratch, weights, padded(S.length, size), S, b, held, start, some, zero)


@called_kernel
def write_out(table, scratch, b, head, h, zero):
    out, size = tensor(table, AT.out), size_of(zero)
    vp = padded(out.width, size)
    norm, result = get(field(table, scratch, ROOM.norm) + h * size, zero), field(table, scratch, ROOM.result) + h * vp
    set_row(out, b, head, 0, result, number(1, zero) / safe(norm, zero), zero)
    sums = splat(zero)
    for c in range(0, vp, BYTES):
        sums = plus(sums, load(result + c, zero))
    if not math.isfinite(total(sums) + norm):
        put(table + 8 * (WORDS_AT + IN.status), WORD + INFINITE)


@called_kernel
def load_queries(table, scratch, b, first, heads, zero):
    q, scale = tensor(table, AT.q), value(table, IN.scale, zero)
    kp = padded(q.width, size_of(zero))
    for h in range(heads):
        query = field(table, scratch, ROOM.query) + h * kp
        load_row(query, q, b, first + h, 0, zero)
        scale_row(query, scale, query, kp, zero)


@kernel
def kept_heads(table, first, heads):
    """Where in the cache the keys of the kept ones among these heads are, and how many are kept."""
    place, kept = WORD - 1, 0
    for head in range(first, first + heads):
        found = get(word(table, IN.place) + 8 * head, WORD)
        if found >= 0:
            place, kept = found, kept + 1
    return place, kept


@called_kernel
def read_heads(table, scratch, b, kv, first, heads, count, zero):
    """The outputs of up to HEADS heads that share a key head; `count` tokens are in the state, this one included."""
    place, kept = kept_heads(table, first, heads)
    held = held_head(table, kv)
    load_queries(table, scratch, b, first, heads, zero)
    if kept < heads and held >= 0:
        full = word(table, IN.sinks) + word(table, IN.window)
        near = min(count, full)
        keys, values = tensor(table, AT.state_k), tensor(table, AT.state_v)
        read_rows(table, scratch, keys, values, b, held, near, False, heads, zero)
        position = get(word(table, IN.position) + 8 * b, WORD)
        if there(table, AT.fq) or (computed(table) and position >= full):  # else nothing is far
            for h in range(heads):
                far_part(table, scratch, b, held, first + h, h, zero)
            read_sums(table, scratch, b, held, zero)
        for h in range(heads):
            if get(word(table, IN.place) + 8 * (first + h), WORD) < 0:
                write_out(table, scratch, b, first + h, h, zero)
    if kept > 0:
        keys, values = tensor(table, AT.keys), tensor(table, AT.values)
        masked = there(table, AT.allowed)
        read_rows(table, scratch, keys, values, b, place, keys.length, masked, heads, zero)
        for h in range(heads):
            if get(word(table, IN.place) + 8 * (first + h), WORD) >= 0:
                write_out(table, scratch, b, first + h, h, zero)


@called_kernel
def padding_rows(table, scratch, b, first, heads, zero):
    """Zeros, where the token is padding."""
    out = tensor(table, AT.out)
    clear(field(table, scratch, ROOM.result), padded(out.width, size_of(zero)), zero)
    for head in range(first, first + heads):
        set_row(out, b, head, 0, field(table, scratch, ROOM.result), zero, zero)


@called_kernel
def new_features(table, scratch, b, kv, count, zero):
    """Into `fk`: of the new key or, where the state holds no features, of the key that leaves the window.

    Angles and fading are left as queries need them.
    """
    if not computed(table):
        if there(table, AT.fk):
            load_row(field(table, scratch, ROOM.fk), tensor(table, AT.fk), b, kv, 0, zero)
        return
    window, sinks = word(table, IN.window), word(table, IN.sinks)
    position = get(word(table, IN.position) + 8 * b, WORD)
    if there(table, AT.state_fk):
        load_angles(table, scratch, b, zero)
        key_features(table, scratch, tensor(table, AT.k), b, kv, 0, kv, position, zero)
        return
    if count >= sinks + window:
        load_old_angles(table, scratch, b, count - window, zero)
        slot = sinks + (count - sinks) % window
        keys, held = tensor(table, AT.state_k), held_head(table, kv)
        key_features(table, scratch, keys, b, held, slot, kv, position - window, zero)
    load_angles(table, scratch, b, zero)
    load_fading(table, scratch, kv, position, zero)


@called_kernel
def keep_angles(table, b, count, zero):
    """What turned the new key, for when it leaves; no other key head reads the row that is overwritten."""
    for place in range(2):
        ring, new = tensor(table, AT.state_cos + place), tensor(table, AT.cos + place)
        for i in range(word(table, IN.turned)):
            angle = get(row(new, b, 0, 0) + i * word(table, IN.angle_step) * new.by_column, zero)
            put(row(ring, b, 0, count % ring.length) + i * ring.by_column, angle)


@called_kernel
def clear_room(table, scratch, zero):
    """What may be read before it is written: rows of heads that are not there."""
    for place in (ROOM.fq, ROOM.weights, ROOM.fk, ROOM.query, ROOM.row, ROOM.values):
        size = get(table + 8 * (ROOM_AT + place + 1), WORD) - get(table + 8 * (ROOM_AT + place), WORD)
        clear(field(table, scratch, place), size - get(table + 8 * (ROOM_AT + ROOM.guard), WORD), zero)


@kernel
def ends(x, zero):
    """The first address after a tensor whose strides are not negative."""
    last = (x.batch - 1) * x.by_batch + (x.heads - 1) * x.by_head + (x.length - 1) * x.by_row
    return x.address + last + (x.width - 1) * x.by_column + size_of(zero)


@called_kernel
def overlaps(table, zero):
    """Does what is read of the token share memory with what is written."""
    for i in range(AT.q, AT.out):
        x = tensor(table, i)
        for j in range(AT.state_k, AT.z + 1):
            y = tensor(table, j)
            if x.address < ends(y, zero) and y.address < ends(x, zero):
                return True
    return False


@kernel
def move_on(table, b):
    at = word(table, IN.count)
    put(at + 8 * b, get(at + 8 * b, WORD) + 1)
    if word(table, IN.position) != at:
        at = word(table, IN.position)
        put(at + 8 * b, get(at + 8 * b, WORD) + 1)


@kernel
def decode(table, zero, scratch, first_lane, last_lane):
    """Lanes first <= b * h_kv < last of the call that the table describes."""
    k, q = tensor(table, AT.k), tensor(table, AT.q)
    group = q.heads // k.heads
    if first_lane < last_lane:
        if overlaps(table, zero):
            put(table + 8 * (WORDS_AT + IN.status), WORD + OVERLAPS)
            return
        clear_room(table, scratch, zero)
    for lane in range(first_lane, last_lane):
        b, kv = lane // k.heads, lane % k.heads
        real = not there(table, AT.real) or get(row(tensor(table, AT.real), b, 0, 0), FLAG) != 0
        count = get(word(table, IN.count) + 8 * b, WORD)
        place, kept = kept_heads(table, kv * group, group)
        if word(table, IN.appends) and kept > 0:
            append(table, scratch, b, kv, place, zero)
        if real and kv == 0 and there(table, AT.state_cos):
            keep_angles(table, b, count, zero)
        if real and kept < group and held_head(table, kv) >= 0:  # else nobody reads its state
            new_features(table, scratch, b, kv, count, zero)
            push(table, scratch, b, kv, count, zero)
        for first in range(kv * group, (kv + 1) * group, HEADS):
            heads = min(HEADS, (kv + 1) * group - first)
            if real:
                read_heads(table, scratch, b, kv, first, heads, count + 1, zero)
            else:
                padding_rows(table, scratch, b, first, heads, zero)
        if real and word(table, IN.moves) and kv == k.heads - 1:
            move_on(table, b)
