"""A piece of a prompt by one compiled call: features and attention together, without tensors of features."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attngap.mechanisms import turns, whole_turns
from attngap.mechanisms.base import Mechanism, State
from attngap.mechanisms.calls import call_parameters, call_setting, possible
from attngap.mechanisms.feature_maps import Prototype
from attngap.mechanisms.held import first_contents
from attngap.mechanisms.rotary import Angles, cut
from attngap.mechanisms.variants.hybrid import Hybrid
from attngap.ops import native
from attngap.ops.hybrid import empty_state
from attngap.ops.hybrid.piece import advance_piece
from attngap.ops.softmax.compiled import attend_into, can_attend


def read_piece(
    mechanism: Mechanism,
    q: Float[Tensor, "b h t d"],
    k: Float[Tensor, "b h_kv t d"],
    v: Float[Tensor, "b h_kv t dv"],
    *,
    state: State | None = None,
    start: Int[Tensor, " b"] | None = None,
    mask: Bool[Tensor, "b t"] | None = None,
    rotary: Angles | None = None,
    skipped: Int[Tensor, " h"] | None = None,
) -> tuple[Float[Tensor, "b h t dv"], State] | None:
    """What `mechanism.read` and `advance` give for several tokens; None where there is no compiled form of both.

    The state is overwritten. Heads that are not 0 in `skipped` are not computed: their rows hold anything, and key
    heads that no other head reads are left out of the state.
    """
    if not isinstance(mechanism, Hybrid) or type(mechanism.feature_map) is not Prototype or not possible():
        return None
    if q.shape[2] == 1 or (mechanism.rotary is not None and rotary is None):
        return None
    rotary = None if mechanism.rotary is None else rotary
    mechanism.validate(None, q, k, v, mask)
    start = torch.zeros(len(q), dtype=torch.long, device=q.device) if start is None else start
    tokens = _Tokens(q, k, v, start, rotary)
    if mechanism.held:
        return _in_turns(mechanism, tokens, state, mask, skipped)
    features = k.new_empty(()).expand(*k.shape[:3], mechanism.feature_map.width)
    state = empty_state(k, v, features, mechanism.window, mechanism.sinks) if state is None else state
    if not _compiles(mechanism, tokens, state):
        return None
    if not all(x.is_contiguous() for x in (*_held(state), state["S"], state["count"])):
        return None
    return _advance(mechanism, state, tokens, mask, skipped), state


def read_in_turns(
    mechanism: Hybrid,
    q: Float[Tensor, "b h t d"],
    k: Float[Tensor, "b h_kv t d"],
    v: Float[Tensor, "b h_kv t dv"],
    *,
    state: State | None = None,
    start: Int[Tensor, " b"] | None = None,
    mask: Bool[Tensor, "b t"] | None = None,
    rotary: Angles | None = None,
    skipped: Int[Tensor, " h"] | None = None,
) -> tuple[Float[Tensor, "b h t dv"], State]:
    """The same of any tokens where tokens leave in turns, with all that a cache keeps of held ones; in torch where
    there is no compiled form. Without gradients the state is overwritten.
    """
    mechanism.validate(None, q, k, v, mask)
    start = torch.zeros(len(q), dtype=torch.long, device=q.device) if start is None else start
    if state is not None and torch.is_grad_enabled():
        state = {name: x.clone() for name, x in state.items()}
    tokens = _Tokens(q, k, v, start, None if mechanism.rotary is None else rotary)
    return _in_turns(mechanism, tokens, state, mask, skipped)


def _in_turns(
    mechanism: Hybrid, tokens: "_Tokens", state: State | None, mask: Bool[Tensor, "b t"] | None, skipped: Tensor | None
) -> tuple[Float[Tensor, "b h t dv"], State]:
    plain, k = mechanism.between, tokens.k
    if state is None:
        features = k.new_empty(()).expand(*k.shape[:3], mechanism.feature_map.width)
        state = empty_state(k, tokens.v, features, plain.window, plain.sinks) | turns.empty(mechanism, k)
        state |= first_contents(mechanism, k)
        if mechanism.rotary is not None:
            state["content"] = k.new_zeros(*k.shape[:2], plain.window, plain.dim)
    if turns.alike(state, mask):
        return _whole(mechanism, plain, tokens, state, skipped)
    empty = tokens.v.new_zeros(*tokens.q.shape[:3], tokens.v.shape[3])

    def one(state: State, i: int, which: Tensor | slice) -> tuple[Tensor, State]:
        return _whole(mechanism, plain, tokens.of(slice(i, i + 1), which), state, skipped)

    return turns.row_by_row(state, empty, mask, one)


def _whole(
    mechanism: Hybrid, plain: Hybrid, tokens: "_Tokens", state: State, skipped: Tensor | None
) -> tuple[Float[Tensor, "b h t dv"], State]:
    """Sequences without padding that hold as many tokens each: up to the next turn, whole turns, and what is left."""
    reader, length, count = _Reader(mechanism, plain, tokens, skipped), tokens.q.shape[2], int(state["count"][0])
    begin = min(length, mechanism.slots - count)
    fresh = not count and possible() and can_attend(*tokens[:3], tokens.v)
    out, state = reader.first(state, begin) if fresh else reader.piece(state, 0, begin)
    outs = [out]
    whole = (length - begin) // mechanism.turn
    if whole > 1 and len(tokens.q) == 1 and _compiles(plain, tokens, state):
        begin, end = begin + whole * mechanism.turn, begin
        out, state = reader.turns(state, end, begin)
        outs.append(out)
    if begin < length:
        out, state = reader.piece(state, begin, length)
        outs.append(out)
    return (out if len(outs) == 1 else torch.cat(outs, 2)), state


class _Reader:
    """Reads tokens first to last of what came in."""

    def __init__(self, mechanism: Hybrid, plain: Hybrid, tokens: "_Tokens", skipped: Tensor | None):
        self.mechanism, self.plain, self.tokens, self.skipped = mechanism, plain, tokens, skipped
        self.content = plain.content(tokens.k, tokens.k, tokens.rotary)[1]

    def features(self, first: int, last: int) -> Float[Tensor, "b h_kv n r"]:
        position = self.tokens.start[:, None] + torch.arange(first, last, device=self.content.device)
        return self.plain.feature_map.key(self.content[:, :, first:last], position)

    def first(self, state: State, last: int) -> tuple[Tensor, State]:
        """The first tokens of sequences: one softmax, for nothing is far."""
        m, (q, k, v) = self.mechanism, (x[:, :, :last] for x in self.tokens[:3])
        out = q.new_zeros(*q.shape[:3], v.shape[3])
        place = torch.arange(m.heads) // (m.heads // m.kv_heads)
        place = place if self.skipped is None else place.masked_fill(self.skipped != 0, -1)
        attend_into(out, q, k, v, place, scale=m.scale)
        state["k"][:, :, :last], state["v"][:, :, :last] = k, v
        begin = m.sinks + m.held
        if last > begin:
            state["fk"][:, :, : last - begin] = self.features(begin, last)
            if "content" in state:
                state["content"][:, :, : last - begin] = self.content[:, :, begin:last]
        turns.note(m, state["asked"], turns.grouped(m, q), 0)
        held = turns.first_held(m, 0, last)
        if held is not None:
            places = turns.first_places(m, held)
            state["held_fk"][:, :, places] = self.features(held.start, held.stop)
            if "held_content" in state:
                state["held_content"][:, :, places] = self.content[:, :, held]
        state["count"] += last
        return out, turns.turned(m, state)

    def piece(self, state: State, first: int, last: int) -> tuple[Tensor, State]:
        def run(before: State, one: int, other: int) -> tuple[Tensor, State]:
            some = self.tokens.of(slice(None), slice(first + one, first + other), skips=first + one)
            given = {"start": some.start, "rotary": some.rotary}
            found = read_piece(self.plain, *some[:3], state=before, **given, skipped=self.skipped)
            return found or self.plain.advance(self.plain.read(None, *some[:3], **given), before)

        def moved(which: slice) -> tuple[int, int]:
            return first + which.start, first + which.stop

        made = (lambda which: self.features(*moved(which))), (lambda which: self.content[:, :, slice(*moved(which))])
        return turns.in_turns(self.mechanism, state, self.tokens.q[:, :, first:last], run, *made)

    def turns(self, state: State, first: int, last: int) -> tuple[Tensor, State]:
        """Whole turns of one sequence, from right after another."""
        m, here = self.mechanism, self.tokens.of(slice(None), slice(first, last), skips=first)
        content = None if here.rotary is None else self.content[:, :, first:last]
        position = here.start + torch.arange(last - first, device=here.q.device)
        given = here.k, here.v, self.features(first, last), content, position
        every = whole_turns.Tokens.of(m, state, *given)

        def batch(states: State, some: slice) -> Tensor:
            return _advance(self.plain, states, here.turns(m.turn, some), None, self.skipped, keeps=False)

        return whole_turns.read_turns(m, state, every, here.q, batch)


class _Tokens(NamedTuple):
    """What comes in."""

    q: Float[Tensor, "b h t d"]
    k: Float[Tensor, "b h_kv t d"]
    v: Float[Tensor, "b h_kv t dv"]
    start: Int[Tensor, " b"]
    rotary: Angles | None

    def of(self, rows: slice, which: Tensor | slice, skips: int = 0) -> "_Tokens":
        """Some tokens of some sequences; `skips` are those before the first."""
        q, k, v = (x[rows][:, :, which] for x in self[:3])
        return _Tokens(q, k, v, self.start[rows] + skips, cut(self.rotary, rows, which))

    def turns(self, length: int, some: slice) -> "_Tokens":
        """Some of the turns of one sequence, as sequences."""
        q, k, v = (x[0].unflatten(1, (-1, length)).transpose(0, 1)[some] for x in self[:3])
        start = self.start + length * torch.arange(some.start, some.stop)
        if self.rotary is None:
            return _Tokens(q, k, v, start, None)
        cos, sin = (x[0].unflatten(0, (-1, length))[some] for x in self.rotary)
        return _Tokens(q, k, v, start, (cos, sin))


def _compiles(plain: Hybrid, tokens: _Tokens, state: State) -> bool:
    if type(plain.feature_map) is not Prototype or not possible():
        return False
    return native.usable(*tokens[:3], *call_parameters(plain).values(), *_held(state), state=state["S"])


def _advance(
    mechanism: Hybrid,
    state: State,
    tokens: _Tokens,
    mask: Bool[Tensor, "b t"] | None,
    skipped: Tensor | None,
    *,
    keeps: bool = True,
) -> Float[Tensor, "b h t dv"]:
    q, k, v, start, rotary = tokens
    angles = None if rotary is None else (rotary[0].to(q.dtype), rotary[1].to(q.dtype))
    setting, parameters = call_setting(mechanism, rotary), call_parameters(mechanism)
    given = {"angles": angles, "mask": mask, "skipped": skipped, "keeps": keeps}
    return advance_piece(state, q, k, v, setting, parameters, start.contiguous(), **given)


def _held(state: State) -> list[Tensor]:
    return [state[name] for name in ("k", "v", "fk", "z")]
