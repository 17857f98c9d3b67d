"""Many turns of a long prompt at once: first what is held in each, then all of their outputs by one compiled call.

What is held (`attngap.mechanisms.turns`) depends on queries and keys, never on outputs. So the turns of a piece can be
gone through with the few queries that score alone. Then every turn is a sequence of its own, with a state of its own,
and a batch of them is read like any other.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attngap.mechanisms import turns
from attngap.mechanisms.base import State
from attngap.mechanisms.variants.hybrid import Hybrid

MOST = 16  # turns at a time: each has a copy of what is held exactly

# reads turns as sequences: their states, and slices of the piece's tokens as (turns, heads, turn, .)
Run = Callable[[State, slice], Float[Tensor, "turns h turn dv"]]


class Tokens(NamedTuple):
    """All tokens that are there or come, one after the other, sinks and held ones first; for one sequence."""

    k: Float[Tensor, "h_kv n d"]
    v: Float[Tensor, "h_kv n dv"]
    fk: Float[Tensor, "h_kv n r"]  # of sinks: zeros
    content: Float[Tensor, "h_kv n d"] | None
    at: Int[Tensor, "h_kv n"]  # positions

    @classmethod
    def of(
        cls, m: Hybrid, state: State, k: Tensor, v: Tensor, fk: Tensor, content: Tensor | None, position: Tensor
    ) -> "Tokens":
        """From the state right after a turn, and the tokens that come."""
        there, ring = m.slots - m.turn, m.window - m.turn
        none = fk.new_zeros(fk.shape[1], m.sinks, fk.shape[3])
        kept = state["gone"] + torch.arange(m.sinks + m.held, there, device=k.device)
        first = torch.arange(m.sinks, device=k.device)
        places = [x.expand(k.shape[1], -1) for x in (first, state["at"][0], kept, position)]
        known = None
        if content is not None:
            some = content.new_zeros(content.shape[1], m.sinks, content.shape[3])
            parts = (some, state["held_content"][0], state["content"][0, :, :ring], content[0])
            known = torch.cat(parts, 1)
        return cls(
            torch.cat((state["k"][0, :, :there], k[0]), 1),
            torch.cat((state["v"][0, :, :there], v[0]), 1),
            torch.cat((none, state["held_fk"][0], state["fk"][0, :, :ring], fk[0]), 1),
            known,
            torch.cat(places, 1),
        )


class Choices(NamedTuple):
    """Tokens by their places among all: what was held during each turn, what left at its end; and what follows."""

    held: Int[Tensor, "turns h_kv held"]
    lost: Int[Tensor, "turns h_kv turn"]
    after: Int[Tensor, "h_kv held"]
    score: Float[Tensor, "h_kv slots"]  # as a state has it


@torch.no_grad()
def read_turns(
    m: Hybrid, state: State, tokens: Tokens, q: Float[Tensor, "1 h t d"], run: Run
) -> tuple[Float[Tensor, "1 h t dv"], State]:
    """`q` are as many tokens as whole turns have, for a state right after a turn."""
    count, outs = q.shape[2] // m.turn, []
    found = choose(m, state, tokens.k, q)
    gone = _pick(tokens.fk, found.lost).to(state["S"].dtype)
    added = {"S": gone.mT @ _pick(tokens.v, found.lost).to(gone.dtype), "z": gone.sum(2)}
    sums = {name: _running(state[name], x) for name, x in added.items()}
    for begin in range(0, count, MOST):
        some = slice(begin, min(count, begin + MOST))
        outs.append(run(_states(m, tokens, found, sums, some), some))
    out = torch.cat(outs).transpose(0, 1).flatten(1, 2)[None]
    return out, _after(m, state, tokens, found, sums, count)


def _running(first: Tensor, added: Float[Tensor, "turns ..."]) -> Float[Tensor, "more ..."]:
    """The sum before each turn, and after the last. torch's own takes ten times as long over so few of so many."""
    sums = torch.cat((first, added))
    for turn in range(len(added)):
        sums[turn + 1] += sums[turn]
    return sums


def choose(m: Hybrid, state: State, k: Float[Tensor, "h_kv n d"], q: Float[Tensor, "1 h t d"]) -> Choices:
    """Turn by turn, as `turns.turn_over` does."""
    _, every = turns.spacing(m)
    sinks, first, ring = m.sinks, m.sinks + m.held, m.window - m.turn
    asked = turns.grouped(m, q)[0].unflatten(2, (-1, m.turn))[:, :, :, every - 1 :: every]
    asked = asked.permute(2, 0, 1, 3, 4).flatten(2, 3) * m.scale  # (turns, h_kv, group * QUERIES, d)
    place = torch.arange(m.slots, device=k.device)
    last = m.slots - m.turn + every * (1 + torch.arange(m.turn // every, device=k.device)) - 1
    later = (place > last[:, None]).repeat(asked.shape[2] // len(last), 1)
    score = k.new_zeros(k.shape[:2], dtype=state["score"].dtype)  # of every token, by its place
    score[:, sinks : m.slots - m.turn] = state["score"][0, :, : m.held + ring]
    held = torch.arange(sinks, first, device=k.device).expand(len(k), -1)
    before, lost = [], []
    for turn, queries in enumerate(asked):
        start = first + turn * m.turn  # of the last tokens
        here = score[:, start : start + ring]
        keys = torch.cat((k[:, :sinks], _pick(k, held[None])[0], k[:, start : start + m.window]), 1)
        logits = (queries @ keys.mT).masked_fill_(later, -torch.inf)
        weights = logits.softmax(-1).square_().sum(1)  # (h_kv, slots)
        here.mul_(turns.FADING).add_(weights[:, first : m.slots - m.turn])
        among = torch.cat((held, place[: m.turn].expand(len(k), -1) + start), 1)
        scores = torch.cat((score.gather(1, held) * turns.FADING + weights[:, sinks:first], here[:, : m.turn]), 1)
        chosen = scores.topk(m.held, -1).indices.sort(-1).values
        before.append(held)
        lost.append(among[torch.ones_like(among, dtype=torch.bool).scatter_(1, chosen, False)].view(len(k), -1))
        held = among.gather(1, chosen)
        score.scatter_(1, held, scores.gather(1, chosen))
    end = first + len(asked) * m.turn
    last_ones = torch.cat((score[:, end : end + ring], score.new_zeros(len(k), m.turn)), 1)
    after = torch.cat((score.gather(1, held), last_ones), 1)
    return Choices(torch.stack(before), torch.stack(lost), held, after)


def _states(m: Hybrid, tokens: Tokens, found: Choices, sums: State, some: slice) -> State:
    """Of plain hybrids at the beginning of some turns."""
    first, ring, held = m.sinks + m.held, m.window - m.turn, found.held[some]
    state: State = {"S": sums["S"][some], "z": sums["z"][some]}
    for name, x in (("k", tokens.k), ("v", tokens.v)):
        slots = x.new_zeros(len(held), len(x), m.slots, x.shape[2])
        slots[:, :, : m.sinks] = x[:, : m.sinks]
        slots[:, :, m.sinks : first] = _pick(x, held)
        begin = first + some.start * m.turn
        windows = x[:, begin : begin + (len(held) - 1) * m.turn + ring].unfold(
            1, ring, m.turn
        )  # (h_kv, turns, d, ring)
        slots[:, :, first : first + ring] = windows.permute(1, 0, 3, 2)
        state[name] = slots
    state["fk"] = tokens.fk.new_zeros(1, 1, 1, 1).expand(len(held), len(tokens.k), m.window, tokens.fk.shape[2])
    return state | {"count": torch.full((len(held),), m.slots - m.turn, device=held.device)}


def _after(m: Hybrid, state: State, tokens: Tokens, found: Choices, sums: State, count: int) -> State:
    first, ring, end = m.sinks + m.held, m.window - m.turn, count * m.turn
    last = slice(first + end, first + end + ring)

    def slots(x: Tensor, before: list[Tensor], room: int) -> Tensor:
        parts = [*before, x[:, last], x.new_zeros(len(x), room, x.shape[2])]
        return torch.cat(parts, 1)[None]

    after = dict(state)
    held = found.after[None]
    for name, x in (("k", tokens.k), ("v", tokens.v)):
        after[name] = slots(x, [x[:, : m.sinks], _pick(x, held)[0]], m.turn)
    after["fk"], after["held_fk"] = slots(tokens.fk, [], m.turn), _pick(tokens.fk, held)
    if tokens.content is not None:
        after["content"], after["held_content"] = slots(tokens.content, [], m.turn), _pick(tokens.content, held)
    after["at"], after["score"] = tokens.at.gather(1, found.after)[None], found.score[None]
    after |= {name: x[-1:].contiguous() for name, x in sums.items()}
    return after | {"gone": state["gone"] + end}


def _pick(x: Float[Tensor, "h_kv n d"], places: Int[Tensor, "turns h_kv m"]) -> Float[Tensor, "turns h_kv m d"]:
    return x[torch.arange(len(x), device=x.device)[:, None], places]
