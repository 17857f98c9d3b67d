"""A piece of a prompt by one compiled call: features and attention together, without tensors of features."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attngap.mechanisms import turns
from attngap.mechanisms.base import Mechanism, State
from attngap.mechanisms.calls import call_parameters, call_setting, possible
from attngap.mechanisms.feature_maps import Prototype
from attngap.mechanisms.rotary import Angles, cut
from attngap.mechanisms.variants.hybrid import Hybrid
from attngap.mechanisms.whole_turns import Passage, tokens_of
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
        return _in_turns(mechanism, tokens, state, mask, skipped)  # the state is not overwritten
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
    """The same of any tokens where tokens leave in turns; in torch where there is no compiled form.

    The state is that of a cache, with the content of its last tokens in place of what turned them
    (`attngap.mechanisms.held`), and is left as it is.
    """
    mechanism.validate(None, q, k, v, mask)
    start = torch.zeros(len(q), dtype=torch.long, device=q.device) if start is None else start
    tokens = _Tokens(q, k, v, start, None if mechanism.rotary is None else rotary)
    return _in_turns(mechanism, tokens, state, mask, skipped)


def _in_turns(
    mechanism: Hybrid, tokens: "_Tokens", state: State | None, mask: Bool[Tensor, "b t"] | None, skipped: Tensor | None
) -> tuple[Float[Tensor, "b h t dv"], State]:
    """Sequence by sequence, without its padding."""
    plain, outs, states = mechanism.between, [], []
    for i in range(len(tokens.q)):
        before = None if state is None else {name: x[i : i + 1] for name, x in state.items()}
        real = slice(None) if mask is None or bool(mask[i].all()) else mask[i].nonzero()[:, 0]
        out, after = _read(mechanism, plain, tokens.of(slice(i, i + 1), real), before, skipped)
        if not isinstance(real, slice):
            empty = out.new_zeros(1, mechanism.heads, tokens.q.shape[2], out.shape[3])
            out = empty.index_copy(2, real, out)
        outs.append(out)
        states.append(after)
    if len(outs) == 1:
        return outs[0], states[0]
    return torch.cat(outs), {name: torch.cat([each[name] for each in states]) for name in states[0]}


def _read(
    mechanism: Hybrid, plain: Hybrid, tokens: "_Tokens", before: State | None, skipped: Tensor | None
) -> tuple[Float[Tensor, "1 h t dv"], State]:
    """One sequence without padding."""
    content = plain.content(tokens.k, tokens.rotary)
    passage = Passage(mechanism, before, tokens_of(mechanism, before, tokens.k, tokens.v, content), tokens.q)
    compiles = _compiles(plain, tokens, passage.sums)

    def run(states: State, start: int, length: int) -> Tensor:
        count = len(states["count"])
        some = tokens.of(slice(None), slice(start, start + count * length), skips=start).turns(length)
        if compiles:
            return _advance(plain, states, some, None, skipped, keeps=False)
        # Nothing leaves the window within a turn, so that no feature of its keys is read.
        states["fk"] = states["k"].new_zeros(count, plain.kv_heads, plain.window, plain.feature_map.width)
        read = plain.read(None, *some[:3], start=some.start, rotary=some.rotary)
        return plain.advance(read, states)[0]

    def first(stop: int) -> Tensor:
        if before is not None:
            fk = tokens.k.new_empty(()).expand(1, plain.kv_heads, plain.window, plain.feature_map.width)
            return run({name: before[name] for name in turns.PLAIN if name in before} | {"fk": fk}, 0, stop)
        if not (possible() and can_attend(*tokens[:3], tokens.v)):
            return plain(
                None, *(x[:, :, :stop] for x in tokens[:3]), rotary=cut(tokens.rotary, slice(None), slice(stop))
            )[0]
        q, k, v = (x[:, :, :stop] for x in tokens[:3])
        out = q.new_zeros(*q.shape[:3], v.shape[3])
        place = torch.arange(plain.heads) // (plain.heads // plain.kv_heads)
        attend_into(out, q, k, v, place if skipped is None else place.masked_fill(skipped != 0, -1), scale=plain.scale)
        return out

    length = tokens.q.shape[2]
    out = passage.read(first, run, length) if length else tokens.q.new_empty(1, plain.heads, 0, tokens.v.shape[3])
    return out, passage.after()


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

    def turns(self, length: int) -> "_Tokens":
        """One sequence as several of this length, one after the other."""
        q, k, v = (x[0].unflatten(1, (-1, length)).transpose(0, 1) for x in self[:3])
        start = self.start + length * torch.arange(len(q), device=q.device)
        if self.rotary is None:
            return _Tokens(q, k, v, start, None)
        cos, sin = (x[0].unflatten(0, (-1, length)) for x in self.rotary)
        return _Tokens(q, k, v, start, (cos, sin))


def _compiles(plain: Hybrid, tokens: _Tokens, state: State) -> bool:
    if type(plain.feature_map) is not Prototype or not possible():
        return False
    tensors = (state[name] for name in ("k", "v", "fk", "z") if name in state)
    return native.usable(*tokens[:3], *call_parameters(plain).values(), *tensors, state=state["S"])


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
