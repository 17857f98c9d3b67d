"""The state of hybrid heads as a cache holds it: without features of keys that are still in the window.

They would be as large as the keys and values beside them, and nothing reads them before their key leaves. So they are
computed when it does, from the key and from the cos and sin that turned it, which all heads share:

    k, v, S, z, count   as in `attngap.ops.hybrid.state`
    cos, sin            (b, window + 1, pairs), where positions are turned back: token p in row p % (window + 1), so
                        that a token does not overwrite what the one that leaves still needs

Key heads that only kept heads read need no state at all: where `heads` are given, it is of these key heads alone. Other
mechanisms have nothing to leave out.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from attngap.mechanisms.base import Mechanism, State, Streams
from attngap.mechanisms.rotary import Angles
from attngap.mechanisms.variants.hybrid import Hybrid, far_streams
from attngap.ops.check import accumulate_dtype
from attngap.ops.hybrid import KeptHeads, decode_step

RINGS = ("cos", "sin")
Heads = Int[Tensor, " n"] | None  # key heads that have a state; None for all


def begin(
    mechanism: Hybrid,
    k: Float[Tensor, "b h_kv t d"],
    v: Float[Tensor, "b h_kv t dv"],
    rotary: Angles | None,
    heads: Heads = None,
) -> State:
    """What to keep of the first tokens of unpadded sequences, none of which has left the window."""
    room = (0, 0, 0, mechanism.sinks + mechanism.window - k.shape[2])
    dtype, r = accumulate_dtype(k.dtype), mechanism.feature_map.width
    state = {
        "k": F.pad(k, room),
        "v": F.pad(v, room),
        "S": k.new_zeros(*k.shape[:2], r, v.shape[3], dtype=dtype),
        "z": k.new_zeros(*k.shape[:2], r, dtype=dtype),
        "count": k.new_full((len(k),), k.shape[2], dtype=torch.long),
    }
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
    held = {name: x for name, x in state.items() if name != "fk"}
    if heads is not None:
        held |= {name: x[:, heads] for name, x in held.items() if name != "count"}
    if mechanism.rotary is None:
        return held
    assert rotary is not None, "features of turned-back keys were computed from it"
    for name, new, start in zip(RINGS, mechanism.rotary.once(rotary), (1.0, 0.0), strict=True):
        ring = held["k"].new_full((len(held["k"]), mechanism.window + 1, new.shape[-1]), start)
        held[name] = _turned(ring if before is None else before[name], new.to(ring.dtype), state["count"], real)
    return held


def release(mechanism: Mechanism, held: State, heads: Heads = None) -> State:
    """The state with the features of its window, as the mechanism goes on from it; zeros where nothing is held."""
    if not isinstance(mechanism, Hybrid):
        return held
    held = _spread(mechanism, held, heads)
    window, sinks = mechanism.window, mechanism.sinks
    slot = torch.arange(window, device=held["k"].device)
    turns = (held["count"][:, None] - 1 - sinks - slot).div(window, rounding_mode="floor")  # since a slot was filled
    token = sinks + slot + window * turns.clamp(min=0)  # (b, window)
    state = {name: x for name, x in held.items() if name not in RINGS}
    return state | {"fk": _features(mechanism, held, held["k"][:, :, sinks:], token)}


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
    leaving = _features(mechanism, held, leaves, (count - window).clamp(min=0)[:, None])
    state = {name: x for name, x in held.items() if name not in RINGS}
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
    window = mechanism.window
    return floats - mechanism.kv_heads * window * mechanism.feature_map.width + 2 * (window + 1) * pairs


def _spread(mechanism: Hybrid, held: State, heads: Heads) -> State:
    """What is held of some key heads as that of all."""
    if heads is None:
        return held
    whole = {
        name: x.new_zeros(len(x), mechanism.kv_heads, *x.shape[2:]).index_copy(1, heads, x)
        for name, x in held.items()
        if name not in ("count", *RINGS)
    }
    return held | whole


def _features(
    mechanism: Hybrid, held: State, keys: Float[Tensor, "b h_kv n d"], token: Int[Tensor, "b n"]
) -> Float[Tensor, "b h_kv n r"]:
    """Of keys that are held, by the number of their token."""
    if mechanism.rotary is not None:
        row = (token % (mechanism.window + 1))[..., None]
        cos, sin = (held[name].gather(1, row.expand(-1, -1, held[name].shape[2])) for name in RINGS)
        keys = mechanism.rotary.unrotate_once(keys, (cos, sin))
    return mechanism.feature_map.key(keys, token)


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
