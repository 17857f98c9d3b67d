"""The state of hybrid heads as a cache holds it: without features of keys that are still in the window.

They would be as large as the keys and values beside them, and nothing reads them before their key leaves. So they are
computed when it does, from the key and from the cos and sin that turned it, which all heads share:

    k, v, S, z, count   as in `attngap.ops.hybrid.state`
    cos, sin            (b, window + 1, pairs), where positions are turned back: token p in row p % (window + 1), so
                        that a token does not overwrite what the one that leaves still needs

Of tokens that are held from anywhere (`attngap.mechanisms.turns`) there are, in place of features,

    at             (b, h_kv, held)     their positions
    held_content   (b, h_kv, held, d)  their keys turned back, where positions are turned back

Key heads that only kept heads read need no state at all: where `heads` are given, it is of these key heads alone. Other
mechanisms have nothing to leave out.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from attngap.mechanisms import turns
from attngap.mechanisms.base import Mechanism, State, Streams
from attngap.mechanisms.rotary import Angles, cut
from attngap.mechanisms.variants.hybrid import Hybrid, far_streams
from attngap.mechanisms.whole_turns import Passage, tokens_of
from attngap.ops.check import accumulate_dtype
from attngap.ops.hybrid import KeptHeads, decode_step

RINGS = ("cos", "sin")
OF_SEQUENCES = ("count", "gone", *RINGS)  # what has no axis of heads
Heads = Int[Tensor, " n"] | None  # key heads that have a state; None for all


def begin(
    mechanism: Hybrid,
    q: Float[Tensor, "b h t d"],
    k: Float[Tensor, "b h_kv t d"],
    v: Float[Tensor, "b h_kv t dv"],
    rotary: Angles | None,
    heads: Heads = None,
) -> State:
    """What to keep of the first tokens of unpadded sequences, while there is room for more."""
    room = (0, 0, 0, mechanism.slots - k.shape[2])
    dtype, r = accumulate_dtype(k.dtype), mechanism.feature_map.width
    state = {
        "k": F.pad(k, room),
        "v": F.pad(v, room),
        "S": k.new_zeros(*k.shape[:2], r, v.shape[3], dtype=dtype),
        "z": k.new_zeros(*k.shape[:2], r, dtype=dtype),
        "count": k.new_full((len(k),), k.shape[2], dtype=torch.long),
    }
    if mechanism.held:
        state |= turns.empty(mechanism, k) | first_contents(mechanism, k)
        turns.note(mechanism, state["asked"], turns.grouped(mechanism, q), 0)
        first = turns.first_held(mechanism, 0, k.shape[2])
        if first is not None and mechanism.rotary is not None:
            state["held_content"][:, :, turns.first_places(mechanism, first)] = _turned_back(
                mechanism, k, rotary, first
            )
    return hold(mechanism, state, rotary, heads=heads)


def hold(
    mechanism: Mechanism,
    state: State,
    rotary: Angles | None,
    *,
    before: State | None = None,
    real: Bool[Tensor, "b t"] | None = None,
    heads: Heads = None,
) -> State:
    """What to keep of the state after tokens that `rotary` turned; `before` is what was held before them."""
    if not isinstance(mechanism, Hybrid):
        return state
    held = _without_rings(state, heads)
    if mechanism.rotary is None:
        return held
    assert rotary is not None, "features of turned-back keys were computed from it"
    for name, new, start in zip(RINGS, mechanism.rotary.once(rotary), (1.0, 0.0), strict=True):
        ring = held["k"].new_full((len(held["k"]), mechanism.window + 1, new.shape[-1]), start)
        ring = ring if before is None else _moved_on(before[name], before, state)
        held[name] = _turned(ring, new.to(ring.dtype), state["count"], real)
    return held


def _without_rings(state: State, heads: Heads) -> State:
    held = {name: x for name, x in state.items() if name not in ("fk", "held_fk", "content", *RINGS)}
    return held if heads is None else {n: x if n in OF_SEQUENCES else x[:, heads] for n, x in held.items()}


def _moved_on(ring: Float[Tensor, "b rows n"], before: State, after: State) -> Float[Tensor, "b rows n"]:
    """A ring as turns number its rows: by the tokens that are still there."""
    if "gone" not in after or bool((after["gone"] == before["gone"]).all()):
        return ring
    rows = torch.arange(ring.shape[1], device=ring.device) + (after["gone"] - before["gone"])[:, None]
    return ring.gather(1, (rows % ring.shape[1])[..., None].expand_as(ring))


def release(mechanism: Mechanism, held: State, heads: Heads = None) -> State:
    """The state with the features of its window, as the mechanism goes on from it; zeros where nothing is held.

    Where tokens leave in turns, with what features are made of in their place: they are computed of what is lost.
    """
    if not isinstance(mechanism, Hybrid):
        return held
    held = _spread(mechanism, held, heads)
    window, sinks = mechanism.window, mechanism.sinks + mechanism.held
    slot = torch.arange(window, device=held["k"].device)
    rounds = (held["count"][:, None] - 1 - sinks - slot).div(window, rounding_mode="floor")  # since a slot was filled
    token = sinks + slot + window * rounds.clamp(min=0)  # (b, window)
    state = {name: x for name, x in held.items() if name not in RINGS}
    content = _content(mechanism, held, held["k"][:, :, sinks:], token)
    if not mechanism.held:
        return state | {"fk": mechanism.feature_map.key(content, token)}
    return state if mechanism.rotary is None else state | {"content": content}


def first_contents(mechanism: Hybrid, k: Float[Tensor, "b h_kv t d"]) -> State:
    """What held tokens are known by before any token: the first places are those of the first tokens."""
    places = torch.arange(mechanism.sinks, mechanism.sinks + mechanism.held, device=k.device)
    found = {"at": places.expand(*k.shape[:2], -1).contiguous()}
    if mechanism.rotary is not None:
        found["held_content"] = k.new_zeros(*k.shape[:2], mechanism.held, mechanism.dim)
    return found


def token_taken(
    mechanism: Hybrid,
    held: State,
    q: Float[Tensor, "b h 1 d"],
    k: Float[Tensor, "b h_kv 1 d"],
    rotary: Angles | None,
    real: Bool[Tensor, " b"] | None = None,
    heads: Heads = None,
) -> None:
    """What turns need of a token that the plain hybrid between them has put into what is held, which is overwritten."""
    first, every = turns.spacing(mechanism)
    counts = held["count"].tolist()
    for i, count in enumerate(counts):
        place = count - 1 - first
        if real is not None and not bool(real[i]):
            continue
        one = slice(i, i + 1)
        if place >= 0 and (place + 1) % every == 0:
            new = turns.grouped(mechanism, q[one])
            turns.note(mechanism, held["asked"][one], new if heads is None else new[:, heads], count - 1)
        which = turns.first_held(mechanism, count - 1, 1) if "held_content" in held else None
        if which is not None:
            content = _turned_back(mechanism, k[one], cut(rotary, one, slice(None)), slice(0, 1))
            content = content if heads is None else content[:, heads]
            held["held_content"][one, :, turns.first_places(mechanism, which)] = content
    for i, count in enumerate(counts):
        if count == mechanism.slots:
            _turn(mechanism, held, i, heads)


def _turn(mechanism: Hybrid, held: State, row: int, heads: Heads) -> None:
    """Of one sequence."""
    one = slice(row, row + 1)
    before = release(mechanism, {name: x[one] for name, x in held.items()}, heads)
    none = before["k"].new_empty(1, mechanism.heads, 0, mechanism.dim)
    new = before["k"][:, :, :0], before["v"][:, :, :0]
    passage = Passage(mechanism, before, tokens_of(mechanism, before, *new, new[0]), none)
    after = passage.after()
    moved = {name: _moved_on(held[name][one], before, after) for name in RINGS if name in held}
    for name, x in (_without_rings(after, heads) | moved).items():
        held[name][one] = x


def _turned_back(
    mechanism: Hybrid, k: Float[Tensor, "b h_kv t d"], rotary: Angles | None, tokens: slice
) -> Float[Tensor, "b h_kv n d"]:
    assert mechanism.rotary is not None
    assert rotary is not None, "a mechanism that turns keys back is given their angles"
    return mechanism.rotary.unrotate(k[:, :, tokens], (rotary[0][:, tokens], rotary[1][:, tokens]))


def token_step(
    mechanism: Hybrid,
    streams: Streams,
    held: State,
    rotary: Angles | None,
    kept: KeptHeads | None,
    heads: Heads = None,
) -> Float[Tensor, "b h 1 dv"]:
    """One token of all heads, those that are kept exact by their cache; what is held is overwritten."""
    window, sinks, count = mechanism.window, mechanism.sinks, held["count"]
    before, held = held, _spread(mechanism, held, heads)
    slot = sinks + (count - sinks).clamp(min=0) % window
    leaves = held["k"].gather(2, slot[:, None, None, None].expand(-1, *held["k"].shape[1:2], 1, mechanism.dim))
    left = (count - window).clamp(min=0)[:, None]
    leaving = mechanism.feature_map.key(_content(mechanism, held, leaves, left), left)
    state = {name: held[name] for name in turns.PLAIN if name in held}
    gain = streams.q.new_zeros(streams.q.shape[:3]) if streams.log_gain is None else streams.log_gain
    out = decode_step(
        state,
        *(streams.q, streams.k, streams.v, far_streams(streams)[0], leaving, gain.to(state["S"].dtype)),
        window=window,
        sinks=sinks,
        scale=mechanism.scale,
        relative=mechanism.relative,
        real=None if streams.mask is None else streams.mask[:, 0],
        kept=kept,
    )
    before |= hold(mechanism, state, rotary, before=held, real=streams.mask, heads=heads)
    return out


def rows_of(heads: Int[Tensor, " n"], kv_heads: int) -> Int[Tensor, " h_kv"]:
    """Where in a state of these key heads each is, -1 for the others."""
    rows = torch.full((kv_heads,), -1, device=heads.device)
    rows[heads] = torch.arange(len(heads), device=heads.device)
    return rows


def held_floats(mechanism: Mechanism, t: int, pairs: int) -> int:
    """Floats that are held for all heads after t tokens; `pairs` of channels are turned by positions."""
    floats = mechanism.kv_heads * mechanism.state_floats(t)
    if not isinstance(mechanism, Hybrid):
        return floats
    width, window = mechanism.feature_map.width, mechanism.window
    floats += mechanism.kv_heads * (mechanism.held * (mechanism.beyond - width) - window * width)
    return floats + 2 * (window + 1) * pairs


def _spread(mechanism: Hybrid, held: State, heads: Heads) -> State:
    """What is held of some key heads as that of all."""
    if heads is None:
        return held
    whole = {
        name: x.new_zeros(len(x), mechanism.kv_heads, *x.shape[2:]).index_copy(1, heads, x)
        for name, x in held.items()
        if name not in OF_SEQUENCES
    }
    return held | whole


def _content(
    mechanism: Hybrid, held: State, keys: Float[Tensor, "b h_kv n d"], token: Int[Tensor, "b n"]
) -> Float[Tensor, "b h_kv n d"]:
    """What features read of keys that are held, by the number of their token."""
    if mechanism.rotary is None:
        return keys
    row = (token % (mechanism.window + 1))[..., None]
    cos, sin = (held[name].gather(1, row.expand(-1, -1, held[name].shape[2])) for name in RINGS)
    return mechanism.rotary.unrotate_once(keys, (cos, sin))


def _turned(
    ring: Float[Tensor, "b rows n"],
    new: Float[Tensor, "#b t n"],
    count: Int[Tensor, " b"],
    real: Bool[Tensor, "b t"] | None,
) -> Float[Tensor, "b rows n"]:
    """The ring with the last of the new tokens in their rows; `count` includes them."""
    rows, t = ring.shape[1], new.shape[1]
    length = torch.full_like(count, t) if real is None else real.sum(1)
    token = count[:, None] - 1 - (count[:, None] - 1 - torch.arange(rows, device=ring.device)) % rows  # (b, rows)
    place = token - (count - length)[:, None]  # among the real ones of the new
    at = place.clamp(0, t - 1)
    if real is not None:
        at = (~real).long().sort(dim=1, stable=True).indices.gather(1, at)
    found = new.expand(len(ring), -1, -1).gather(1, at[..., None].expand_as(ring))
    return torch.where((place >= 0)[..., None], found, ring)
