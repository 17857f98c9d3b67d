"""The definition, in torch, and what calls its compiled form."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attngap.ops import native
from attngap.ops.check import accumulate_dtype

FADING = 0.5  # of a score, from turn to turn


class Turns(NamedTuple):
    """How many tokens are read exactly, and of a turn the tokens, and how many lie between queries that score."""

    sinks: int
    held: int
    window: int
    turn: int
    every: int

    @property
    def slots(self) -> int:
        return self.sinks + self.held + self.window

    @property
    def scoring(self) -> Int[Tensor, " n"]:
        """The slots of the queries that score, when all slots are full."""
        return self.slots - self.turn + self.every * (1 + torch.arange(self.turn // self.every)) - 1


class Chosen(NamedTuple):
    """Tokens by their places among all: what was held during each turn, what left at its end; and what follows."""

    held: Int[Tensor, "turns h_kv held"]
    lost: Int[Tensor, "turns h_kv turn"]
    after: Int[Tensor, "h_kv held"]
    score: Float[Tensor, "h_kv slots"]  # of held and last tokens


@torch.no_grad()
def choose(
    turns: Turns,
    k: Float[Tensor, "h_kv n d"],
    asked: Float[Tensor, "turns h_kv rows d"],
    score: Float[Tensor, "h_kv slots"] | None = None,
) -> Chosen:
    """For each key head, from right after a turn; `k` begins with sinks and held tokens.

    `asked` are the queries of each turn that score, of all heads of a group one head after the other, times the scale
    of logits. Of equals that compete the earlier ones are held.
    """
    if not len(asked):
        first = torch.arange(turns.sinks, turns.sinks + turns.held, device=k.device).expand(len(k), -1)
        empty = k.new_zeros(len(k), turns.held + turns.window, dtype=accumulate_dtype(k.dtype))
        none = (first.new_empty(0, len(k), size) for size in (turns.held, turns.turn))
        return Chosen._make((*none, first, empty if score is None else score))
    places = k.new_zeros(k.shape[:2], dtype=accumulate_dtype(k.dtype))
    if score is not None:
        there = min(k.shape[1], turns.slots) - turns.sinks
        places[:, turns.sinks : turns.sinks + there] = score[:, :there]
    if native.usable(k, asked, state=places[None, None]):
        from attngap.ops.holding.compiled import choose_compiled

        held, lost = choose_compiled(turns, k, asked, places)
    else:
        held, lost = _choose(turns, k, asked, places)
    end = turns.sinks + turns.held + len(asked) * turns.turn
    last = places[:, end : end + turns.window - turns.turn]
    found = torch.cat((places.gather(1, held[-1]), last), 1)
    room = turns.held + turns.window - found.shape[1]
    return Chosen(held[:-1], lost, held[-1], torch.nn.functional.pad(found, (0, room)))


def _choose(turns: Turns, k: Tensor, asked: Tensor, score: Tensor) -> tuple[Tensor, Tensor]:
    """What is held in each turn and after the last, and what each loses; the scores of all are overwritten."""
    sinks, first, ring = turns.sinks, turns.sinks + turns.held, turns.window - turns.turn
    place = torch.arange(turns.slots, device=k.device)
    later = place > turns.scoring.to(k.device)[:, None]
    held = torch.arange(sinks, first, device=k.device).expand(len(k), -1)
    found, lost = [held], []
    for turn, queries in enumerate(asked):
        start = first + turn * turns.turn  # of the last tokens
        here = score[:, start : start + ring]
        among = torch.cat((held, place[: turns.turn].expand(len(k), -1) + start), 1)
        keys = torch.cat((k[:, :sinks], _pick(k, held), k[:, start : start + turns.window]), 1).to(score.dtype)
        logits = (queries.to(score.dtype) @ keys.mT).unflatten(1, (-1, len(later))).masked_fill_(later, -torch.inf)
        weights = logits.softmax(-1).square_().sum((1, 2))  # (h_kv, slots)
        # Tokens of this very turn are not scored: near tokens are weighed for being near.
        here.mul_(FADING).add_(weights[:, first : turns.slots - turns.turn])
        scores = torch.cat((score.gather(1, held) * FADING + weights[:, sinks:first], here[:, : turns.turn]), 1)
        chosen = scores.sort(stable=True, descending=True).indices[:, : turns.held].sort(-1).values
        lost.append(among[torch.ones_like(among, dtype=torch.bool).scatter_(1, chosen, False)].view(len(k), -1))
        held = among.gather(1, chosen)
        score.scatter_(1, held, scores.gather(1, chosen))
        found.append(held)
    return torch.stack(found), torch.stack(lost)


def _pick(x: Float[Tensor, "h_kv n d"], places: Int[Tensor, "h_kv m"]) -> Float[Tensor, "h_kv m d"]:
    return x.gather(1, places[..., None].expand(*places.shape, x.shape[2]))
