"""Tokens from anywhere that replaced heads read exactly, chosen anew as the text goes on.

Features hold what many keys have in common and get wrong the single keys that queries look for. So a hybrid with
`held` tokens keeps, for each of its key heads, those that its queries weighed most of late, whatever their place. Its
last tokens leave in turns: at most `window` of them are near, and when they are as many, the oldest `turn` leave
together. They and the held ones compete for the held places; those that lose join the sums of features.

What competes is a score: the squares of the softmax weights over what is near, summed over a few queries of each turn
and the heads of a group, halved from turn to turn. It reads queries and keys, never values or features, so that the
mechanism stays linear in its values and does not depend on where a sequence was cut.

Between two turns nothing leaves, and the heads are those of a plain hybrid whose sinks are followed by the held tokens
(`Hybrid.between`); that is what all kernels compute. To its state (`attngap.ops.hybrid.state`) come

    held_fk  (b, h_kv, held, r)            features of the held tokens, for when they lose their place
    score    (b, h_kv, held + window)      of held and last tokens
    asked    (b, h_kv, group * QUERIES, d) the queries of this turn that will score
    gone     (b,)                          tokens that have left: `count` is of those that are there

and where features can be made again, as in a cache (`attngap.mechanisms.held`), what they are made of: `held_content`
and `content` of held and last tokens, and `at`, the positions of held ones.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attngap.mechanisms.base import State, Streams
from attngap.ops.check import accumulate_dtype
from attngap.ops.holding import FADING

if TYPE_CHECKING:
    from attngap.mechanisms.variants.hybrid import Hybrid

QUERIES = 8  # of each head and turn, evenly spaced: all of them choose little better
SHORTEST, LONGEST = 32, 128  # turns: many take time, long ones take room
PLAIN = ("k", "v", "fk", "S", "z", "count")  # the state of a plain hybrid
WRITTEN = ("held_fk", "asked")  # in place, while tokens are read
Run = Callable[[State, int, int], tuple[Tensor, State]]  # reads tokens start to stop from a plain state


def room_for(window: int, share: float, *, size: int, more: int, asked: int) -> tuple[int, int, int] | None:
    """Window, held tokens and turn that a cache has room for in place of a plain `window`; None where it is too small.

    A share of the tokens is held. `size` are floats of a key and its value, `more` those of a held one beyond them,
    `asked` those of the queries of a turn.
    """
    turn = max(SHORTEST, min(LONGEST, window // 8 // QUERIES * QUERIES))
    held = round(share * window)
    left = (window * size - asked - held * (size + more + 1)) // (size + 1)
    return (left, held, turn) if held and left >= 2 * turn else None


def floats(mechanism: "Hybrid") -> int:
    """Floats of the state beyond those of the plain hybrid between turns, for each key head."""
    m = mechanism
    return m.held * m.feature_map.width + m.held + m.window + _rows(m) * m.dim


def empty(mechanism: "Hybrid", k: Tensor) -> State:
    """What turns add to the state of a plain hybrid before any token, for keys like these."""
    m, b, kv = mechanism, len(k), mechanism.kv_heads
    return {
        "held_fk": k.new_zeros(b, kv, m.held, m.feature_map.width),
        "score": k.new_zeros(b, kv, m.held + m.window, dtype=accumulate_dtype(k.dtype)),
        "asked": k.new_zeros(b, kv, _rows(m), m.dim),
        "gone": k.new_zeros(b, dtype=torch.long),
    }


def step(mechanism: "Hybrid", state: State, streams: Streams) -> tuple[Float[Tensor, "b h 1 dv"], State]:
    """One token: a step of the plain hybrid, and a turn for sequences whose room is full."""
    count = state["count"]
    out, plain = mechanism.between.step(plain_part(state), streams)
    state = state | plain
    real = streams.real[:, 0]
    assert streams.fk is not None
    state["held_fk"] = _held_by_one(mechanism, state["held_fk"], streams.fk, count, real)
    state["asked"] = _asked_by_one(mechanism, state["asked"], streams.q, count, real)
    return out, turned(mechanism, state)


def in_turns(
    mechanism: "Hybrid",
    state: State,
    q: Float[Tensor, "b h t d"],
    run: Run,
    features: Float[Tensor, "b h_kv t r"],
) -> tuple[Tensor, State]:
    """Several tokens of sequences without padding that hold as many each: the plain hybrid from turn to turn.

    `features` are those of their keys. The state's entries of `WRITTEN` are overwritten.
    """
    outs, at, length = [], 0, q.shape[2]
    while at < length:
        count = int(state["count"][0])
        stop = min(length, at + mechanism.slots - count)
        out, plain = run(plain_part(state), at, stop)
        state = state | plain
        note(mechanism, state["asked"], grouped(mechanism, q[:, :, at:stop]), count)
        first = first_held(mechanism, count, stop - at)
        if first is not None:
            tokens, places = slice(at + first.start - count, at + first.stop - count), first_places(mechanism, first)
            state["held_fk"][:, :, places] = features[:, :, tokens]
        if count + stop - at == mechanism.slots:
            state = turn_over(mechanism, state)
        outs.append(out)
        at = stop
    return (outs[0] if len(outs) == 1 else torch.cat(outs, 2)), state


def chunked(
    mechanism: "Hybrid", streams: Streams, state: State | None, chunk: int | None, *, inplace: bool
) -> tuple[Float[Tensor, "b h t dv"], State]:
    """Any tokens, in the form of `Hybrid.chunked`."""
    m, plain = mechanism, mechanism.between
    fresh = state is None
    state = m.init_state(streams) if state is None else state
    if not (inplace or fresh):
        state = state | {name: state[name].clone() for name in WRITTEN}

    def of(streams: Streams, state: State) -> tuple[Tensor, State]:
        def run(before: State, start: int, stop: int) -> tuple[Tensor, State]:
            return plain.chunked(streams.slice(start, stop), before, chunk)

        assert streams.fk is not None
        return in_turns(m, state, streams.q, run, streams.fk)

    if alike(state, streams.mask):
        return of(streams.replace(mask=None), state)
    empty = streams.v.new_zeros(*streams.q.shape[:3], streams.v.shape[3])
    return row_by_row(state, empty, streams.mask, lambda one, i, tokens: of(_one(streams, i, tokens), one))


def _one(streams: Streams, i: int, tokens: Tensor | slice) -> Streams:
    """Some tokens of one sequence."""
    fields = {"q": streams.q, "k": streams.k, "v": streams.v, "fq": streams.fq, "fk": streams.fk}
    cut = {name: None if x is None else x[i : i + 1, :, tokens] for name, x in fields.items()}
    gain = None if streams.log_gain is None else streams.log_gain[i : i + 1, :, tokens]
    return Streams(**cut, log_gain=gain)  # pyright: ignore[reportArgumentType]


def row_by_row(
    state: State,
    empty: Float[Tensor, "b h t dv"],
    mask: Bool[Tensor, "b t"] | None,
    run: Callable[[State, int, Tensor | slice], tuple[Tensor, State]],
) -> tuple[Float[Tensor, "b h t dv"], State]:
    """`run(state, sequence, tokens)` for sequences that differ in what they hold or have padding, one after the other.

    `empty` are zeros of the output's shape.
    """
    outs, states = [], []
    for i in range(len(state["count"])):
        one = {name: x[i : i + 1] for name, x in state.items()}
        tokens = slice(None) if mask is None or bool(mask[i].all()) else mask[i].nonzero()[:, 0]
        out = empty[i : i + 1]
        if isinstance(tokens, slice):
            out, one = run(one, i, tokens)
        elif len(tokens):
            some, one = run(one, i, tokens)
            out = out.index_copy(2, tokens, some)
        outs.append(out)
        states.append(one)
    return torch.cat(outs), {name: torch.cat([each[name] for each in states]) for name in state}


def alike(state: State, mask: Tensor | None) -> bool:
    """Whether all sequences hold as many tokens and none has padding."""
    count = state["count"]
    return (len(count) == 1 or bool((count == count[0]).all())) and (mask is None or bool(mask.all()))


def plain_part(state: State) -> State:
    return {name: state[name] for name in PLAIN if name in state}


def grouped(mechanism: "Hybrid", q: Float[Tensor, "b h t d"]) -> Float[Tensor, "b h_kv group t d"]:
    return q.unflatten(1, (mechanism.kv_heads, -1))


@torch.no_grad()
def note(
    mechanism: "Hybrid", asked: Float[Tensor, "b n rows d"], q: Float[Tensor, "b n group t d"], count: int
) -> None:
    """Write down the queries of this piece that will score; `count` tokens were there before it."""
    first, every = spacing(mechanism)
    rows = asked.unflatten(2, (q.shape[2], -1))  # (b, n, group, QUERIES, d)
    last = [first + every * (j + 1) - 1 - count for j in range(rows.shape[3])]  # their places in the piece
    here = [j for j, place in enumerate(last) if 0 <= place < q.shape[3]]
    if here:
        rows[:, :, :, here[0] : here[-1] + 1] = q[:, :, :, last[here[0]] : last[here[-1]] + 1 : every]


def first_held(mechanism: "Hybrid", count: int, length: int) -> slice | None:
    """Which of `length` tokens, the first of which is number `count`, fill the held places at the beginning."""
    start, stop = max(count, mechanism.sinks), min(count + length, mechanism.sinks + mechanism.held)
    return slice(start, stop) if start < stop else None


def first_places(mechanism: "Hybrid", tokens: slice) -> slice:
    """Their places among the held ones: they are held before they are chosen."""
    return slice(tokens.start - mechanism.sinks, tokens.stop - mechanism.sinks)


def _held_by_one(mechanism: "Hybrid", held_fk: Tensor, fk: Tensor, count: Tensor, real: Tensor) -> Tensor:
    """The same for one token of sequences that may differ."""
    here = (torch.arange(held_fk.shape[2], device=fk.device) == (count - mechanism.sinks)[:, None]) & real[:, None]
    return torch.where(here[:, None, :, None], fk, held_fk)


def _asked_by_one(mechanism: "Hybrid", asked: Tensor, q: Tensor, count: Tensor, real: Tensor) -> Tensor:
    """The same for one token of sequences that may differ."""
    first, every = spacing(mechanism)
    place = count - first
    wanted = real & (place >= 0) & ((place + 1) % every == 0)
    new = grouped(mechanism, q.detach())  # (b, h_kv, group, 1, d)
    rows = asked.unflatten(2, (new.shape[2], -1))
    here = (torch.arange(rows.shape[3], device=q.device) == (place // every)[:, None]) & wanted[:, None]
    return torch.where(here[:, None, None, :, None], new, rows).flatten(2, 3)


def spacing(mechanism: "Hybrid") -> tuple[int, int]:
    """The first token of a turn among those that are there, and how many lie between one query that scores and the
    next."""
    return mechanism.slots - mechanism.turn, mechanism.turn // min(QUERIES, mechanism.turn)


def _rows(mechanism: "Hybrid") -> int:
    return mechanism.heads // mechanism.kv_heads * min(QUERIES, mechanism.turn)


def turned(mechanism: "Hybrid", state: State) -> State:
    """The state after a turn of those sequences whose room is full."""
    full = state["count"] == mechanism.slots
    if not bool(full.any()):
        return state
    after = turn_over(mechanism, state)
    if bool(full.all()):
        return after
    return {name: torch.where(full.view(-1, *[1] * (x.ndim - 1)), after[name], x) for name, x in state.items()}


def turn_over(mechanism: "Hybrid", state: State) -> State:
    """The oldest of the last tokens leave. All sequences are full, so that tokens lie in the order of their slots."""
    m = mechanism
    sinks, competing = m.sinks, m.held + m.turn
    score, chosen = _choose(m, state)
    among = slice(sinks, sinks + competing)
    fk = torch.cat((state["held_fk"], state["fk"][:, :, : m.turn]), 2)  # (b, h_kv, competing, r)
    lost = fk.new_ones(fk.shape[:3]).scatter(2, chosen, 0.0)[..., None]
    dtype = state["S"].dtype
    gone = (fk * lost).to(dtype)
    after = dict(state)
    after["S"] = state["S"] + gone.mT @ state["v"][:, :, among].to(dtype)
    after["z"] = state["z"] + gone.sum(2)
    after["held_fk"] = _pick(fk, chosen)
    after["fk"] = _moved_up(state["fk"], m.turn)
    for name in ("k", "v"):
        x = state[name]
        held = _pick(x[:, :, among], chosen)
        after[name] = torch.cat((x[:, :, :sinks], held, _moved_up(x[:, :, sinks + m.held :], m.turn)), 2)
    after["score"] = torch.cat((score.gather(2, chosen), _moved_up(score[..., None], competing, m.turn)[..., 0]), 2)
    after["count"], after["gone"] = state["count"] - m.turn, state["gone"] + m.turn
    return after


@torch.no_grad()
def _choose(m: "Hybrid", state: State) -> tuple[Float[Tensor, "b n slots"], Tensor]:
    """The scores of held and last tokens, and which of those that compete are held, in order."""
    score = state["score"]
    asked, k = state["asked"].to(score.dtype), state["k"].to(score.dtype)
    _, every = spacing(m)
    slots = m.slots
    logits = asked @ k.mT * m.scale  # (b, n, rows, slots)
    place = torch.arange(slots, device=k.device)
    last = slots - m.turn + every * (1 + torch.arange(m.turn // every, device=k.device)) - 1
    later = (place > last[:, None]).repeat(logits.shape[2] // len(last), 1)
    weights = logits.masked_fill_(later, -torch.inf).softmax(-1).square_().sum(2)  # (b, n, slots)
    # Tokens of this very turn are not scored: near tokens are weighed for being near.
    score = FADING * score
    score[:, :, : -m.turn] += weights[:, :, m.sinks : -m.turn]
    among = score[:, :, : m.held + m.turn].sort(stable=True, descending=True).indices  # of equals the earlier ones
    chosen = among[:, :, : m.held].sort(-1).values
    return score, chosen


def _pick(x: Float[Tensor, "b n t d"], chosen: Tensor) -> Float[Tensor, "b n m d"]:
    return x.gather(2, chosen[..., None].expand(*chosen.shape, x.shape[3]))


def _moved_up(x: Float[Tensor, "b n t d"], by: int, room: int | None = None) -> Tensor:
    """Without its first tokens, and with room at the end for as many (or `room`) new ones."""
    room = by if room is None else room
    return torch.cat((x[:, :, by:], x.new_zeros(*x.shape[:2], room, x.shape[3])), 2)
