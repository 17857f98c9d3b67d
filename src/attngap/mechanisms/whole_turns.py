"""Many turns of a sequence at once: first what is held in each, then all of their outputs by one compiled call.

What is held (`attngap.mechanisms.turns`) depends on queries and keys, never on outputs. So the turns of a piece are
gone through with the few queries that score alone; features are computed of what is lost, and of nothing else. Then
every turn is a sequence of its own, with a state of its own, and a batch of them is read like any other.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from attngap.mechanisms import turns
from attngap.mechanisms.base import State
from attngap.mechanisms.variants.hybrid import Hybrid
from attngap.ops.check import accumulate_dtype
from attngap.ops.holding import Turns, choose

MOST = 16  # turns at a time: each has a copy of what is held exactly


class Tokens(NamedTuple):
    """All tokens of one sequence that are there or come, one after the other, sinks and held ones first."""

    k: Float[Tensor, "h_kv n d"]
    v: Float[Tensor, "h_kv n dv"]
    content: Float[Tensor, "h_kv n d"]  # what features read of keys
    at: Int[Tensor, "h_kv n"]  # positions


Run = Callable[[State, int, int], Float[Tensor, "n h t dv"]]  # states, the first row, the rows of each


def sizes(m: Hybrid) -> Turns:
    return Turns(m.sinks, m.held, m.window, m.turn, turns.spacing(m)[1])


def tokens_of(m: Hybrid, before: State | None, k: Float[Tensor, "1 h_kv t d"], v: Tensor, content: Tensor) -> Tokens:
    """`before` also has the `content` of the last tokens, where that is not their keys."""
    if before is None:
        at = torch.arange(k.shape[2], device=k.device).expand(k.shape[1], -1)
        return Tokens(k[0], v[0], content[0], at)
    there, first = int(before["count"][0]), m.sinks + m.held
    keys, values = (torch.cat((before[name][0, :, :there], x[0]), 1) for name, x in (("k", k), ("v", v)))
    if "content" in before:
        last = before["content"][0, :, : max(0, there - first)]
        known = torch.cat((before["k"][0, :, : m.sinks], before["held_content"][0], last), 1)
        content = torch.cat((known[:, :there], content[0]), 1)
    else:
        content = keys
    place = torch.arange(keys.shape[1], device=k.device)
    at = (place + (place >= first) * before["gone"]).repeat(len(keys), 1)
    some = min(there, first) - m.sinks
    if some > 0:
        at[:, m.sinks : m.sinks + some] = before["at"][0, :, :some]
    return Tokens(keys, values, content, at)


def askers(
    m: Hybrid, before: Tensor | None, q: Float[Tensor, "1 h t d"], there: int
) -> tuple[Float[Tensor, "turns h_kv rows d"], Float[Tensor, "h_kv rows d"]]:
    """The queries that score in each whole turn, and those of the turn that is not over, as a state has them.

    `before` are those that a state had after `there` tokens.
    """
    first, every = turns.spacing(m)
    each, n = m.turn // every, there + q.shape[2]
    known = max(0, there - first) // every
    new = turns.grouped(m, q)[0, :, :, max(0, first + every * (known + 1) - 1 - there) :: every]
    group = new.shape[1]
    if before is not None and known:
        new = torch.cat((before[0].unflatten(1, (group, each))[:, :, :known], new), 2)
    over = turns_over(m, n) * each
    whole = new[:, :, :over].unflatten(2, (-1, each)).permute(2, 0, 1, 3, 4).flatten(2, 3)
    rest = F.pad(new[:, :, over : over + each], (0, 0, 0, max(0, each - (new.shape[2] - over))))
    return whole, rest.flatten(1, 2)


def turns_over(m: Hybrid, tokens: int) -> int:
    """How many turns so many tokens have brought to an end."""
    return max(0, (tokens - m.slots) // m.turn + 1)


class Passage:
    """One sequence whose turns are known: its sums, the states between which its rows are read, and what is left."""

    def __init__(self, m: Hybrid, before: State | None, tokens: Tokens, q: Float[Tensor, "1 h t d"]):
        self.m, self.before, self.tokens = m, before, tokens
        self.there = 0 if before is None else int(before["count"][0])
        asked, self.asked = askers(m, None if before is None else before["asked"], q, self.there)
        score = None if before is None else before["score"][0]
        self.found = choose(sizes(m), tokens.k, asked * m.scale, score)
        self.turns = len(asked)
        self.sums = self._sums()

    def _sums(self) -> State:
        """Before each turn, and after the last."""
        m, kv, dv = self.m, len(self.tokens.k), self.tokens.v.shape[2]
        dtype = accumulate_dtype(self.tokens.k.dtype)
        if self.before is None:
            first = {"S": torch.zeros(1, kv, m.feature_map.width, dv, dtype=dtype, device=self.tokens.k.device)}
            first["z"] = first["S"][..., 0]
        else:
            first = {name: self.before[name] for name in ("S", "z")}
        if not self.turns:
            return first
        lost = self.found.lost.transpose(0, 1).flatten(1)  # (h_kv, turns * turn)
        fk = m.feature_map.key(_pick(self.tokens.content, lost)[None], self.tokens.at.gather(1, lost)[None])[0]
        gone = fk.to(dtype).unflatten(1, (self.turns, m.turn)).transpose(0, 1)  # (turns, h_kv, turn, r)
        values = _pick(self.tokens.v, lost).unflatten(1, (self.turns, m.turn)).transpose(0, 1)
        return {"S": _running(first["S"], gone.mT @ values.to(dtype)), "z": _running(first["z"], gone.sum(2))}

    def states(self, first: int, count: int) -> State:
        """Of plain hybrids at the beginning of some turns after the first."""
        m, kv = self.m, len(self.tokens.k)
        turn = torch.arange(first, first + count, device=self.tokens.k.device)
        last = m.sinks + m.held + m.turn * turn[:, None] + torch.arange(m.window, device=turn.device)
        # Slots of the turn's own tokens are not read before they are written: anything may be in them.
        last = last.clamp(max=self.tokens.k.shape[1] - 1)[:, None].expand(-1, kv, -1)
        sinks = torch.arange(m.sinks, device=turn.device).expand(count, kv, -1)
        held = self.found.held[first : first + count] if first < self.turns else self.found.after[None]
        places = torch.cat((sinks, held, last), 2)  # (count, h_kv, slots)
        k, v = (_pick(x, places) for x in self.tokens[:2])
        fk = k.new_empty(()).expand(count, kv, m.window, m.feature_map.width)
        sums = {name: x[first : first + count].contiguous() for name, x in self.sums.items()}
        return {"k": k, "v": v, "fk": fk, **sums, "count": turn.new_full((count,), m.slots - m.turn)}

    def read(self, first: Callable[[int], Tensor], run: Run, length: int) -> Float[Tensor, "1 h t dv"]:
        """All rows, if any: `first` reads so many, up to the end of the first turn, `run` those after it."""
        stop, begin = min(length, max(0, self.m.slots - self.there)), 1
        outs = [first(stop)] if stop else []
        while begin < self.turns:
            count = min(MOST, self.turns - begin)
            out = run(self.states(begin, count), stop, self.m.turn)
            outs.append(out.transpose(0, 1).flatten(1, 2)[None])
            begin, stop = begin + count, stop + count * self.m.turn
        if stop < length:
            outs.append(run(self.states(self.turns, 1), stop, length - stop))
        return outs[0] if len(outs) == 1 else torch.cat(outs, 2)

    def after(self) -> State:
        """What a cache keeps (`attngap.mechanisms.held`), and the content of the last tokens."""
        m, (k, v, content, at), found = self.m, self.tokens, self.found
        begin = m.sinks + m.held
        last = slice(begin + self.turns * m.turn, None)
        count = k.shape[1] - self.turns * m.turn

        def slots(x: Tensor, room: int, *parts: Tensor) -> Tensor:
            whole = torch.cat((*parts, x[:, last]), 1)
            return F.pad(whole, (0, 0, 0, room - whole.shape[1]))[None]

        if self.turns:
            held = found.after
        else:
            held = torch.arange(m.sinks, max(m.sinks, min(begin, k.shape[1])), device=k.device).expand(len(k), -1)
        state: State = {name: slots(x, m.slots, x[:, : m.sinks], _pick(x, held)) for name, x in (("k", k), ("v", v))}
        state |= {name: x[-1:].contiguous() for name, x in self.sums.items()}
        state["at"] = at.gather(1, held)[None]
        if held.shape[1] < m.held:  # places that the first tokens have not reached yet
            rest = torch.arange(m.sinks + held.shape[1], begin, device=k.device)
            state["at"] = torch.cat((state["at"], rest.expand(1, len(k), -1)), 2)
        if m.rotary is not None:
            state["held_content"] = F.pad(_pick(content, held), (0, 0, 0, m.held - held.shape[1]))[None]
            state["content"] = slots(content, m.window)
        state |= {"score": found.score[None], "asked": self.asked[None]}
        gone = 0 if self.before is None else self.before["gone"]
        state["count"] = torch.full((1,), count, device=k.device)
        return state | {"gone": gone + state["count"].new_full((1,), self.turns * m.turn)}


def _running(first: Tensor, added: Float[Tensor, "turns ..."]) -> Float[Tensor, "more ..."]:
    """The sum before each turn, and after the last. torch's own takes ten times as long over so few of so many."""
    if torch.is_grad_enabled() and (first.requires_grad or added.requires_grad):
        return torch.cat((first, added)).cumsum(0)
    sums = torch.cat((first, added))
    for turn in range(len(added)):
        sums[turn + 1] += sums[turn]
    return sums


def _pick(x: Float[Tensor, "h_kv n d"], places: Int[Tensor, "*turns h_kv m"]) -> Float[Tensor, "*turns h_kv m d"]:
    """Rows of each key head by their places. An embedding copies rows whole, which gathering does not."""
    rows = places + x.shape[1] * torch.arange(len(x), device=x.device)[:, None]
    return F.embedding(rows, x.flatten(0, 1))
