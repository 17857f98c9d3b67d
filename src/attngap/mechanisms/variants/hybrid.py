"""Exact softmax nearby, features far away, under one normalizer."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from attngap.errors import AttngapError, unknown
from attngap.mechanisms import turns
from attngap.mechanisms.base import Mechanism, State, Streams, positions, read_out
from attngap.mechanisms.feature_maps import feature_map as make_map
from attngap.mechanisms.rotary import Angles, layout
from attngap.ops.check import check_count
from attngap.ops.hybrid import Near, empty_state, hybrid_attention, near_attention
from attngap.ops.hybrid.definition import hybrid_weights
from attngap.ops.hybrid.state import roll_up
from attngap.ops.normalizer import safe_normalizer
from attngap.ops.pairs import expand_heads

GAINS = ("none", "head", "query")


class Hybrid(Mechanism):
    """w_ij ~ exp(s q_i . k_j) for near keys and exp(g_i) phi(q_i) . psi(k_j) for the other past keys.

    Near are the first `sinks` and the last `window`, as in LoLCATs (arXiv 2410.10254) with sinks. `feature_map` is
    any name of `attngap.mechanisms.feature_maps`, its options in `map_options`; "none" drops the far keys. With
    `relative` far weights are measured against the row's largest near logit. g is zero (`gain="none"`), one learned
    number a head ("head") or an affine function of the query ("query").

    With `rotary`, the layout of a model's rotary positions (`attngap.mechanisms.rotary`), phi, psi and g read queries
    and keys turned back by their own position, so that they hold at every length; near keys stay as they are. Without,
    they read what the model turned, and from position `reach` on a query reads the near keys alone: features fitted to
    shorter sequences have not seen what positions make of keys and queries there. Causal only.

    With `held` each key head also reads as many tokens from anywhere exactly, those that its queries weighed most, and
    the last `window` at most: their oldest `turn` leave together (`attngap.mechanisms.turns`).
    """

    name, paper, normalized = "hybrid", "2410.10254", True

    def __init__(
        self,
        heads: int,
        dim: int,
        value_dim: int | None = None,
        *,
        feature_map: str = "hedgehog",
        map_options: Mapping[str, Any] | None = None,
        window: int = 64,
        sinks: int = 4,
        held: int = 0,
        turn: int = turns.SHORTEST,
        relative: bool = True,
        gain: str = "head",
        reach: int | None = None,
        rotary: Mapping[str, str] | None = None,
        scale: float | None = None,
        kv_heads: int | None = None,
    ):
        super().__init__(heads, dim, value_dim, kv_heads=kv_heads)
        check_count("hybrid: window", window, 1)
        check_count("hybrid: sinks", sinks, 0)
        check_count("hybrid: held", held, 0)
        check_count("hybrid: turn", turn, 1)
        if held and (turn >= window or turn % min(turn, turns.QUERIES)):
            raise AttngapError(
                f"hybrid: a turn of held tokens must be shorter than the window of {window} and, from {turns.QUERIES} "
                f"on, a multiple of {turns.QUERIES}, got {turn}"
            )
        if reach is not None:
            check_count("hybrid: reach", reach, 1)
        if gain not in GAINS:
            raise unknown("hybrid gain", gain, GAINS)
        self.feature_map = make_map(feature_map, heads, dim, self.kv_heads, **(map_options or {}))
        self.window, self.sinks, self.relative, self.gain = window, sinks, relative, gain
        self.held, self.turn = held, turn if held else 0
        self.reach = reach
        self.rotary = layout(rotary)
        self.scale = dim**-0.5 if scale is None else scale
        far = self.feature_map.rank > 0  # without far features there is nothing to scale
        self.log_gain = nn.Parameter(torch.zeros(heads)) if far and gain != "none" else None
        self.gain_weight = nn.Parameter(torch.zeros(heads, dim)) if far and gain == "query" else None
        self.learned = self.feature_map.learned or self.log_gain is not None

    def with_window(self, window: int) -> "Hybrid":
        """The same features, with the same parameters, behind another window."""
        other = copy.copy(self)
        other.window, other.held, other.turn = window, 0, 0
        return other

    def with_held(self, share: float) -> "Hybrid":
        """The same with this share of the window's room for tokens from anywhere; as it is where that is too small."""
        other = copy.copy(self)
        for name, value in self.sharing(share).items():
            setattr(other, name, value)
        return other

    def with_sinks(self, sinks: int) -> "Hybrid":
        """The same features, with the same parameters, beside more or fewer sinks."""
        other = copy.copy(self)
        other.sinks = sinks
        return other

    @property
    def between(self) -> "Hybrid":
        """The plain hybrid that it is between two turns, with the same parameters."""
        return self.with_window(self.window).with_sinks(self.sinks + self.held)

    @property
    def slots(self) -> int:
        """Tokens that are read exactly, at most; the first ones of a sequence all are."""
        return self.sinks + self.held + self.window

    @property
    def room(self) -> int:
        """The window of a plain hybrid whose cache is as large."""
        if not self.held:
            return self.window
        size = self.dim + self.value_dim
        floats = self.held * (size + self.beyond + 1) + self.window + self._asked
        return self.window + round(floats / size)

    def sharing(self, share: float) -> dict[str, int]:
        """Options of a hybrid that gives this share of its window's room to held tokens; none where it is too small."""
        sizes = {"size": self.dim + self.value_dim, "more": self.beyond, "asked": self._asked}
        found = turns.room_for(self.window, share, **sizes)
        return {} if found is None else dict(zip(("window", "held", "turn"), found, strict=True))

    @property
    def beyond(self) -> int:
        """Floats of a held token in a cache, beyond its key and value: its position, and its key turned back by it."""
        return 2 + (0 if self.rotary is None else self.dim)

    @property
    def _asked(self) -> int:
        """Floats of the queries of a turn, for each key head."""
        return self.dim * min(turns.QUERIES, self.turn or turns.QUERIES) * self.heads // self.kv_heads

    def read(self, x, q, k, v, *, start=0, mask=None, rotary=None) -> Streams:
        self.validate(x, q, k, v, mask)
        content = self.content(q, rotary), self.content(k, rotary)
        return self._encode(q, k, v, positions(q, start, mask), mask, *content)

    def content(self, x: Float[Tensor, "b n t d"], rotary: Angles | None) -> Float[Tensor, "b n t d"]:
        """What features read of queries or keys: turned back where a layout is known."""
        if self.rotary is None:
            return x
        if rotary is None:
            raise AttngapError(
                "hybrid: features of turned-back keys need the cos and sin of the positions: pass rotary"
            )
        return self.rotary.unrotate(x, rotary)

    def encode(self, x, q, k, v, position, mask) -> Streams:
        return self._encode(q, k, v, position, mask, q, k)

    def _encode(self, q, k, v, position, mask, content_q, content_k) -> Streams:
        fq, fk = self.feature_map.query(content_q, position), self.feature_map.key(content_k, position)
        gain = None if self.log_gain is None else self.gain_of(content_q)
        if self.reach is not None:
            gain = q.new_zeros(q.shape[:3]) if gain is None else gain
            gain = gain.masked_fill((position >= self.reach)[:, None], -torch.inf)
        return Streams(q, k, v, fq=fq, fk=fk, log_gain=gain, mask=mask)

    def init_state(self, streams: Streams) -> State:
        fk = far_streams(streams)[1]
        state = empty_state(streams.k, streams.v, fk, self.window, self.sinks + self.held)
        return state | turns.empty(self, streams.k) if self.held else state

    def state_after(
        self,
        k: Float[Tensor, "b h_kv t d"],
        v: Float[Tensor, "b h_kv t dv"],
        rotary: Angles | None = None,
        held: Int[Tensor, "b h_kv n"] | None = None,
    ) -> State:
        """The state of whole unpadded sequences, from their keys and values alone; gradients reach the features.

        `held` are tokens between sinks and window that each key head holds exactly. They lie beside the sinks, so that
        the state is one of `with_sinks(sinks + n)`.
        """
        if self.held:
            raise AttngapError("hybrid: what turns leave depends on queries too; feed the tokens, or take with_window")
        more = 0 if held is None else held.shape[2]
        t, first, sinks = k.shape[2], self.sinks, self.sinks + more
        last = t - self.window
        if more > max(0, last - first):
            raise AttngapError(
                f"hybrid: {more} tokens cannot be held of {max(0, last - first)} beyond sinks and window"
            )
        read = self.content(k, rotary)
        position = torch.arange(t, device=k.device)[None]
        fk = self.feature_map.key(read[:, :, first:], position[:, first:])  # (b, h_kv, t - first, r)
        state = empty_state(k, v, fk, self.window, sinks)
        if last > first:
            gone = fk[:, :, : last - first].to(state["S"].dtype)
            if held is not None:
                gone = gone.scatter(2, (held - first)[..., None].expand(*held.shape, fk.shape[3]), 0.0)
            state["S"] = gone.mT @ v[:, :, first:last].to(gone.dtype)
            state["z"] = gone.sum(2)
        for name, x in (("k", k), ("v", v)):
            state[name] = roll_up(x[:, :, :0], x, 0, self.window, sinks)
            if held is not None:
                chosen = x.gather(2, held[..., None].expand(*held.shape, x.shape[3]))
                state[name] = torch.cat((x[:, :, :first], chosen, state[name][:, :, sinks:]), 2)
        state["fk"] = roll_up(fk[:, :, :0], fk[:, :, more:], 0, self.window, 0)
        state["count"] = state["count"] + t
        return state

    def step(self, state: State, streams: Streams) -> tuple[Float[Tensor, "b h 1 dv"], State]:
        if self.held:
            return turns.step(self, state, streams)
        real = streams.real[:, None, :, None]  # (b, 1, 1, 1)
        new = self._write(state, streams)
        now = streams.wide()
        q, fq = now.q, far_streams(now)[0]
        k, v = (expand_heads(new[name], self.heads).to(q.dtype) for name in ("k", "v"))
        filled = torch.arange(k.shape[2], device=k.device) < new["count"][:, None]  # (b, slots)
        filled = filled[:, None, None] | ~real  # a row of padding is zeroed below; it must not be empty
        logits = (q @ k.mT * self.scale).masked_fill(~filled, -torch.inf)  # (b, h, 1, slots)
        top = logits.amax(-1, keepdim=True)
        gain = torch.zeros_like(top) if now.log_gain is None else now.log_gain[..., None]
        gain = gain + top if self.relative else gain
        mass = read_out(fq, new["z"][..., None])
        # Measured against the larger of the largest near weight and the far mass, so that neither overflows.
        unit = torch.maximum(top, torch.where(mass == 0, -torch.inf, gain + mass.abs().log())).detach()
        near, far = (logits - unit).exp(), (gain - unit).exp()
        total = near.sum(-1, keepdim=True) + far * mass
        out = (near @ v + far * read_out(fq, new["S"])) / safe_normalizer(total)
        return (out * real).to(streams.v.dtype), new

    def weights(self, streams: Streams) -> Float[Tensor, "b h t t"]:
        streams = streams.wide()
        if self.held:
            identity = torch.eye(streams.length, dtype=streams.v.dtype, device=streams.v.device)
            return self.chunked(streams.replace(v=identity.expand(*streams.v.shape[:2], -1, -1)))[0]
        fq, fk = far_streams(streams)
        return hybrid_weights(streams.q, streams.k, fq, fk, **self._options(streams))

    def chunked(
        self,
        streams: Streams,
        state: State | None = None,
        chunk: int | None = None,
        *,
        near: Near | None = None,
        inplace: bool = False,
    ) -> tuple[Float[Tensor, "b h t dv"], State]:
        """`near`, from `near` of the same q, k and v, spares computing it again where only the far part is trained.

        With `inplace` the state handed in may be overwritten.
        """
        if self.held:
            return turns.chunked(self, streams, state, chunk, inplace=inplace)
        fq, fk = far_streams(streams)
        options = {"state": state, "chunk": chunk, "near": near, "inplace": inplace, **self._options(streams)}
        out, after = hybrid_attention(streams.q, streams.k, streams.v, fq, fk, **options)
        return out, after

    def advance(self, streams, state):
        return self.chunked(streams, state, inplace=not torch.is_grad_enabled())

    def near(
        self, q: Float[Tensor, "b h t d"], k: Float[Tensor, "b h_kv t d"], v: Float[Tensor, "b h_kv t dv"]
    ) -> Near:
        """The near part of whole unpadded sequences; no parameter changes it."""
        return near_attention(q, k, v, window=self.window, sinks=self.sinks, scale=self.scale)

    def state_floats(self, t: int) -> int:
        r, more = self.feature_map.width, turns.floats(self) if self.held else 0
        return self.slots * (self.dim + self.value_dim) + self.window * r + r * (self.value_dim + 1) + more

    def state_rank(self, t: int) -> int:
        """What is held exactly before t are columns of their own; every other column is far for all rows from t on."""
        return min(self.slots + self.feature_map.rank, t + 1)

    def _options(self, streams: Streams) -> dict[str, Any]:
        return {
            "window": self.window,
            "sinks": self.sinks,
            "scale": self.scale,
            "log_gain": streams.log_gain,
            "relative": self.relative,
            "mask": streams.mask,
        }

    def gain_of(self, content: Float[Tensor, "b h t d"]) -> Float[Tensor, "b h t"]:
        """The log-gain of far weights, from the queries that features read."""
        if self.log_gain is None:
            return content.new_zeros(content.shape[:3])
        gain = self.log_gain[None, :, None].expand(content.shape[:3])
        return gain if self.gain_weight is None else gain + (content * self.gain_weight[:, None]).sum(-1)

    def _write(self, state: State, streams: Streams) -> State:
        """Put the token into its slot; the one it displaces, if any, joins the far sums. Padding changes nothing."""
        real = streams.real[:, :, None, None]  # (b, 1, 1, 1)
        _, fk = far_streams(streams)
        count = state["count"]  # (b,)
        ring = (count - self.sinks) % self.window
        slot = torch.where(count < self.sinks, count, self.sinks + ring)
        here = (torch.arange(state["k"].shape[2], device=fk.device) == slot[:, None])[:, None, :, None] & real
        ring_here = here[:, :, self.sinks :]  # (b, 1, window, 1)
        leaves = ring_here & (count >= self.sinks + self.window)[:, None, None, None]
        gone = (state["fk"] * leaves).to(state["S"].dtype)  # (b, h_kv, window, r)
        return {
            "k": torch.where(here, streams.k, state["k"]),
            "v": torch.where(here, streams.v, state["v"]),
            "fk": torch.where(ring_here, fk, state["fk"]),
            "S": state["S"] + gone.mT @ state["v"][:, :, self.sinks :].to(gone.dtype),
            "z": state["z"] + gone.sum(2),
            "count": count + streams.real[:, 0],
        }


def far_streams(streams: Streams) -> tuple[Tensor, Tensor]:
    """The features of queries and keys."""
    if streams.fq is None or streams.fk is None:
        raise AttngapError("hybrid: these streams have no far features; make them with this mechanism's `read`")
    return streams.fq, streams.fk
