"""The state of hybrid attention: of constant size, and one token at a time.

Of n tokens it keeps the sinks, the last `window` others, and a sum over the features of all that have left the window:

    k, v    (b, h_kv, sinks + window, .)  token p in slot p while p < sinks + window; after that token p takes the place
                                          of token p - window, in slot sinks + (p - sinks) % window
    fk      (b, h_kv, window, r)          the features of the ring, kept for when its tokens leave
    S, z    (b, h_kv, r, dv), (b, h_kv, r) sums of fk v^T and of fk over the tokens that have left
    count   (b,)                          real tokens seen

The batch is axis 0 of every tensor, so `index_select` on all of them reorders beams.
"""

import dataclasses

import torch
from torch import Tensor

from attngap.errors import AttngapError
from attngap.ops.check import accumulate_dtype, check_device, shape
from attngap.ops.exponent import weight_exp_
from attngap.ops.hybrid.blocks import combine
from attngap.ops.normalizer import safe_normalizer

State = dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Which tokens of a piece are real: sequences may differ in what they have seen and in their padding."""

    seen: Tensor  # (b,) int64: tokens before this piece
    lengths: Tensor  # (b,) int64: real tokens of this piece
    index: Tensor | None  # (b, t) int64: where they are, then anything; None if there is no padding

    @staticmethod
    def of(seen: Tensor, mask: Tensor | None, t: int) -> "Tokens":
        if mask is None:
            return Tokens(seen.contiguous(), torch.full_like(seen, t), None)
        real = mask.bool()
        return Tokens(seen.contiguous(), real.sum(1), (~real).long().sort(dim=1, stable=True).indices)


def empty_state(k: Tensor, v: Tensor, fk: Tensor, window: int, sinks: int) -> State:
    """The state before any token, for keys, values and features like these."""
    b, heads, _, d = k.shape
    dv, r = v.shape[-1], fk.shape[-1]
    acc = accumulate_dtype(k.dtype)
    return {
        "k": k.new_zeros(b, heads, sinks + window, d),
        "v": k.new_zeros(b, heads, sinks + window, dv),
        "fk": k.new_zeros(b, heads, window, r),
        "S": k.new_zeros(b, heads, r, dv, dtype=acc),
        "z": k.new_zeros(b, heads, r, dtype=acc),
        "count": k.new_zeros(b, dtype=torch.long),
    }


def check_hybrid_state(
    state: State, k: Tensor, v: Tensor, fk: Tensor, window: int, sinks: int, *, features: bool = True
) -> None:
    """Refuse a state that was made for other shapes, another window or other sinks, or lacks its window's features."""
    b, heads, _, d = k.shape
    dv, r = v.shape[-1], fk.shape[-1]
    acc = accumulate_dtype(k.dtype)
    want = {
        "k": ((b, heads, sinks + window, d), k.dtype),
        "v": ((b, heads, sinks + window, dv), k.dtype),
        "fk": ((b, heads, window, r), k.dtype),
        "S": ((b, heads, r, dv), acc),
        "z": ((b, heads, r), acc),
        "count": ((b,), torch.long),
    }
    if not features:
        del want["fk"]
    if set(state) != set(want):
        raise AttngapError(f"state must hold {', '.join(want)}, got {', '.join(state) or 'nothing'}")
    for name, (size, dtype) in want.items():
        x = state[name]
        if tuple(x.shape) != size or x.dtype != dtype:
            raise AttngapError(
                f"state[{name!r}] must be {size} {dtype} for window={window}, sinks={sinks} and these inputs, "
                f"got {shape(x)} {x.dtype}: a state goes with the window and sinks it was made with"
            )
        check_device(f"state[{name!r}]", x, k)


def unroll(state: State, count: int, window: int, sinks: int) -> tuple[Tensor, Tensor, Tensor]:
    """Kept keys and values in the order of their tokens, sinks first, and the features of those that are no sinks."""
    k, v, fk = state["k"], state["v"], state["fk"]
    if count <= sinks + window:
        return k[:, :, :count], v[:, :, :count], fk[:, :, : max(0, count - sinks)]
    head = (count - sinks) % window  # the slot of the oldest token in the ring
    k, v = (torch.cat((x[:, :, :sinks], x[:, :, sinks + head :], x[:, :, sinks : sinks + head]), 2) for x in (k, v))
    return k, v, torch.cat((fk[:, :, head:], fk[:, :, :head]), 2)


def roll_up(past: Tensor, new: Tensor, count: int, window: int, sinks: int) -> Tensor:
    """The buffer after new tokens: `past` is what `unroll` gave at `count` tokens, or its features with sinks = 0."""
    t, kept = new.shape[2], past.shape[2]
    total = count + t
    if total <= sinks + window:
        empty = new.new_zeros(*new.shape[:2], sinks + window - total, new.shape[3])
        return torch.cat((past, new, empty), 2)
    old_sinks = min(count, sinks)
    parts = [past[:, :, :old_sinks], new[:, :, : sinks - old_sinks]]
    missing = window - t  # how many of the last `window` tokens come from the past
    last = torch.cat((past[:, :, kept - missing :], new), 2) if missing > 0 else new[:, :, t - window :]
    head = (total - sinks) % window
    parts += [last[:, :, window - head :], last[:, :, : window - head]]
    return torch.cat(parts, 2)


def push_piece(state: State, k: Tensor, v: Tensor, fk: Tensor, tokens: Tokens, window: int, sinks: int) -> State:
    """The rings after a piece, and the count; sequences may differ in what they have seen and in their padding."""
    slots = torch.arange(sinks + window, device=k.device)
    total = (tokens.seen + tokens.lengths)[:, None]
    turns = (total - 1 - slots).div(window, rounding_mode="floor")  # of the ring, since its slot was first filled
    last = torch.where((slots < sinks) | (turns < 0), slots, slots + window * turns)  # token of each slot, (b, slots)
    fresh = (last >= tokens.seen[:, None]) & (last < total)
    at = (last - tokens.seen[:, None]).clamp(0, k.shape[2] - 1)
    at = at if tokens.index is None else tokens.index.gather(1, at)

    def pushed(ring: Tensor, new: Tensor, skip: int) -> Tensor:
        index = at[:, None, skip:, None].expand(*ring.shape)
        return torch.where(fresh[:, None, skip:, None], new.gather(2, index), ring)

    rings = {"k": pushed(state["k"], k, 0), "v": pushed(state["v"], v, 0), "fk": pushed(state["fk"], fk, sinks)}
    return rings | {"count": state["count"] + tokens.lengths}


def step(
    state: State, q, k, v, fq, fk, gain: Tensor, *, window: int, sinks: int, scale: float, relative: bool
) -> Tensor:
    """One token, (b, h, 1, dv); the state is overwritten."""
    b, h, _, d = q.shape
    kv, acc = k.shape[1], state["S"].dtype
    bias = _push(state, k, v, fk, window, sinks)
    size = sinks + window if bias is not None else min(int(state["count"][0]), sinks + window)
    K, V = (state[name].view(b * kv, sinks + window, -1)[:, :size].to(acc) for name in ("k", "v"))
    S, z = state["S"].view(b * kv, -1, V.shape[2]), state["z"].view(b * kv, -1, 1)
    P = torch.bmm(q.reshape(b * kv, -1, d).to(acc) * scale, K.mT)
    if bias is not None:
        P = P.view(b, -1, size).add_(bias).view(P.shape)
    top = P.amax(-1, keepdim=True)
    lift = gain.reshape(b * kv, -1, 1)
    Q = fq.reshape(b * kv, h // kv, -1).to(acc)
    mass = torch.bmm(Q, z)
    unit, c = combine(top, lift + top if relative else lift, mass)
    P = weight_exp_(P.sub_(unit))
    if bias is not None:
        P = P.view(b, -1, size).mul_(bias == 0).view(P.shape)
    n = P.sum(-1, keepdim=True).addcmul_(mass, c)
    out = torch.bmm(P, V).baddbmm_(Q * c, S).div_(safe_normalizer(n))
    return out.view(b, h, 1, -1).to(q.dtype)


def _push(state: State, k: Tensor, v: Tensor, fk: Tensor, window: int, sinks: int) -> Tensor | None:
    """Take in one token. Returns (b, 1, slots) of -inf at empty slots where sequences differ in length, else None."""
    counts = state["count"].tolist()
    state["count"] += 1
    full = sinks + window
    if len(set(counts)) == 1:
        _push_at(state, k, v, fk, counts[0], full, sinks)
        return None
    for i, count in enumerate(counts):
        one = {name: x[i : i + 1] for name, x in state.items()}
        _push_at(one, k[i : i + 1], v[i : i + 1], fk[i : i + 1], count, full, sinks)
    slots = torch.arange(full, device=k.device)
    empty = slots >= state["count"][:, None, None]
    return torch.zeros_like(empty, dtype=state["S"].dtype).masked_fill_(empty, -torch.inf)


def _push_at(state: State, k: Tensor, v: Tensor, fk: Tensor, count: int, full: int, sinks: int) -> None:
    """The token in the slot leaves the window, the new one takes its place."""
    slot = count if count < full else sinks + (count - sinks) % (full - sinks)
    if count >= full:
        leaving, value = state["fk"][:, :, slot - sinks] if "fk" in state else fk[:, :, 0], state["v"][:, :, slot]
        S, z = state["S"], state["z"]
        S.addcmul_(leaving[..., None].to(S.dtype), value[:, :, None].to(S.dtype))
        z += leaving
    state["k"][:, :, slot] = k[:, :, 0]
    state["v"][:, :, slot] = v[:, :, 0]
    if slot >= sinks and "fk" in state:
        state["fk"][:, :, slot - sinks] = fk[:, :, 0]
