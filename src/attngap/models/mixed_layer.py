"""What a cache holds of a converted layer: keys and values of groups that keep softmax, a state of fixed size for all.

`update` hands back only the new keys and values; the attention call that follows it takes the layer as `pending()` and
puts away what it read. What attention reads is kept, not what the model hands over, so that models which cache a
compressed form and expand it (DeepSeek's latent keys) work too.
"""

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attngap.errors import AttngapError
from attngap.mechanisms.base import Mechanism, State
from attngap.mechanisms.decoding import Decoder
from attngap.mechanisms.held import hold, release, token_taken
from attngap.mechanisms.prompts import read_in_turns, read_piece
from attngap.mechanisms.rotary import Angles
from attngap.mechanisms.variants.hybrid import Hybrid
from attngap.models.compat import CacheLayerMixin, LinearAttentionLayer

SPARE = 64  # tokens of room behind the keys and values held in full: they are moved once in so many tokens, not at each
_HERE = threading.local()


class _Beginning:
    """Keys or values as an attribute of a layer: as many tokens of their room as are held."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, layer: "MixedLayer", owner: type | None = None) -> Any:
        room = layer.room.get(self.name)
        return None if room is None else room[:, :, : layer.held]

    def __set__(self, layer: "MixedLayer", x: Tensor | None) -> None:
        layer.room.pop(self.name, None)
        layer.held = 0 if x is None else x.shape[2]
        if x is not None:
            layer.room[self.name] = x


class MixedLayer(CacheLayerMixin):
    """Bounded memory for replaced heads, beside the full cache of the key heads that some kept head still reads."""

    is_sliding = False
    supports_early_init = False
    keys: Any = _Beginning()  # (b, g, held, d), None before the first update like the two below
    values: Any = _Beginning()
    count: Any  # (b,) real tokens seen, padding left out

    def __init__(self, groups: Int[Tensor, " g"], layer: int = 0, heads: Int[Tensor, " n"] | None = None):
        """`groups` are the key heads whose full cache some kept head reads; `heads` have a state, None for all."""
        self.room: dict[str, Tensor] = {}  # what keys and values are the beginning of
        self.held = 0  # tokens of it
        super().__init__()
        self.groups, self.layer, self.heads = groups, layer, heads
        self.state: State | None = None
        self.count = None
        self.seen = 0  # tokens seen, padding included
        self.unread = False
        self.past: _Past | None = None
        self.decoder: Decoder | None = None
        self.form: tuple[int, int] | None = None  # window and sinks of the state, where they are not the mechanism's
        self._formed: dict[str, tuple[Mechanism, Hybrid]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """A copy has tensors of its own, which its decoder must be laid out for anew."""
        return vars(self) | {"decoder": None, "_formed": {}}

    def formed(self, mechanism: Mechanism) -> Mechanism:
        """The mechanism with the window and the sinks that the state has."""
        if self.form is None or not isinstance(mechanism, Hybrid):
            return mechanism
        window, sinks = self.form
        return self._made("formed", mechanism, lambda: mechanism.with_window(window).with_sinks(sinks))

    def reads_by(self, mechanism: Hybrid) -> Hybrid:
        """What reads a token: the mechanism as it is formed, or what it is between two turns."""
        formed = self.formed(mechanism)
        assert isinstance(formed, Hybrid)
        return self._made("between", formed, lambda: formed.between) if formed.held else formed

    def _made(self, name: str, mechanism: Mechanism, make: Callable[[], Hybrid]) -> Hybrid:
        """Made once for a mechanism: every token asks for it."""
        found = self._formed.get(name)
        if found is None or found[0] is not mechanism:
            found = self._formed[name] = mechanism, make()
        return found[1]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.groups = self.groups.to(self.device)
        self.heads = None if self.heads is None else self.heads.to(self.device)
        self.count = torch.zeros(len(key_states), dtype=torch.long, device=self.device)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Announce new tokens; their keys and values come by again in the attention call."""
        if self.unread:
            raise AttngapError(
                "This model fills its cache without attending to it, so a converted cache cannot reach its heads. "
                "Generate with use_cache=False"
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.seen += key_states.shape[2]
        self.unread = True
        _HERE.layer = self
        return key_states, value_states

    def append(self, k: Float[Tensor, "b h_kv t d"], v: Float[Tensor, "b h_kv t dv"]) -> tuple[Tensor, Tensor]:
        """All keys and values of the groups that kept heads read, the new ones included."""
        new = {"keys": k[:, self.groups], "values": v[:, self.groups]}
        if self.keys is None:
            self.keys, self.values = (x[:, :, :0] for x in new.values())
        if k.requires_grad or v.requires_grad or self.keys.requires_grad or self.values.requires_grad:
            self.keys, self.values = (torch.cat((getattr(self, name), x), 2) for name, x in new.items())
        elif len(self.groups):
            keys, values, after = self.grow(k.shape[2])
            keys[:, :, after - k.shape[2] : after], values[:, :, after - k.shape[2] : after] = new.values()
        return self.keys, self.values

    def grow(self, tokens: int = 1) -> tuple[Tensor, Tensor, int]:
        """Room for all keys and values of these groups, and how many are held from now on: the last are to be written.

        It grows by blocks, so that what is held is moved now and then and not at each token.
        """
        before, self.held = self.held, self.held + tokens
        keys, values = self.room["keys"], self.room["values"]
        if keys.shape[2] < self.held:
            for name, x in self.room.items():
                self.room[name] = x.new_empty(*x.shape[:2], self.held + SPARE, x.shape[3])
                self.room[name][:, :, :before] = x[:, :, :before]
            keys, values = self.room["keys"], self.room["values"]
        return keys, values, self.held

    def compute(
        self,
        mechanism: Mechanism,
        q: Float[Tensor, "b h t d"],
        k: Float[Tensor, "b h_kv t d"],
        v: Float[Tensor, "b h_kv t dv"],
        real: Bool[Tensor, "b t"] | None,
        rotary: Angles | None = None,
        skipped: Int[Tensor, " h"] | None = None,
    ) -> Float[Tensor, "b h t dv"]:
        """The mechanism's output for new tokens; the state moves on. Heads that `skipped` marks may be left out."""
        step = _Step(self.formed(mechanism), q, k, v, real, rotary, skipped)
        if self.past is not None:
            self.past.steps.append(step)
        return self._advance(step)

    def _advance(self, step: "_Step") -> Tensor:
        mechanism, tokens = step.mechanism, (step.q, step.k, step.v)
        given = {"mask": step.real, "rotary": step.rotary}
        state = None if self.state is None else release(mechanism, self.state, self.heads)
        more = {"state": state, "start": self.count, "skipped": step.skipped}
        if isinstance(mechanism, Hybrid) and mechanism.held:
            found = read_in_turns(mechanism, *tokens, **more, **given)
        else:
            found = read_piece(mechanism, *tokens, **more, **given)
        if found is not None:
            out, after = found
        elif state is None:
            out, after = mechanism(None, *tokens, **given)
        else:
            streams = mechanism.read(None, *tokens, start=self.count, **given)
            out, after = mechanism.advance(streams, state)
        self.state = hold(mechanism, after, step.rotary, before=self.state, real=step.real, heads=self.heads)
        self.passed(step.real, step.length)
        return out

    def passed(self, real: Bool[Tensor, "b t"] | None, length: int) -> None:
        """The state has taken in `length` new tokens, of which `real` are no padding."""
        self.count = self.count + (length if real is None else real.sum(1))
        self.unread = False

    def token_taken(
        self,
        mechanism: Hybrid,
        q: Float[Tensor, "b h 1 d"],
        k: Float[Tensor, "b h_kv 1 d"],
        rotary: Angles | None,
        real: Bool[Tensor, " b"] | None,
    ) -> None:
        """One call has put a token into the state; where tokens leave in turns, it may be time for one."""
        formed = self.formed(mechanism)
        if isinstance(formed, Hybrid) and formed.held:
            assert self.state is not None
            token_taken(formed, self.state, q, k, rotary, real, self.heads)

    @property
    def is_croppable(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """A state cannot forget a token; only one that was told to remember how it was can go back."""
        return self.past is not None

    def activate_past_recording(self) -> None:
        """From now on keep what is needed to take tokens back: assisted decoding proposes and withdraws them."""
        self.past = _Past(self)

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Forget the last tokens (a negative number, as everywhere in transformers)."""
        tokens_to_remove = int(tokens_to_remove)  # older transformers count in tensors
        if not self.is_initialized or (tokens_to_remove == 0 and self.past is None):
            return
        if self.past is None or -tokens_to_remove > self.past.tokens or tokens_to_remove > 0:
            kept = 0 if self.past is None else self.past.tokens
            raise AttngapError(
                f"A converted model's state cannot take back {abs(tokens_to_remove)} tokens, it remembers {kept}. "
                "Decode without an assistant, or call activate_past_recording() on the cache first"
            )
        left = self.past.tokens + tokens_to_remove
        self.seen += tokens_to_remove
        if tokens_to_remove and self.keys is not None:
            self.held += tokens_to_remove
        if tokens_to_remove:
            self.state = self.past.state  # recording may have begun before the first token
            self.count = torch.zeros_like(self.count) if self.past.count is None else self.past.count
            for step in self.past.first(left):
                self._advance(step)
        self.past = _Past(self)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.keys = self.values = self.state = self.count = None
        self.is_initialized, self.unread, self.seen = False, False, 0
        self.past = self.decoder = self.form = None
        self._formed = {}

    def reorder_cache(self, beam_idx: Int[Tensor, " n"]) -> None:
        self._choose(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            self._choose(torch.arange(len(self.count), device=self.device).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Int[Tensor, " n"]) -> None:
        self._choose(indices)

    def offload(self) -> None:
        self._move(torch.device("cpu"))

    def prefetch(self) -> None:
        if self.is_initialized:
            self._move(self.device)

    def bytes(self) -> int:
        """Bytes of keys and values with their spare room, counts and state."""
        held = [*self.room.values(), self.count, *(self.state or {}).values()]
        return sum(x.numel() * x.element_size() for x in held if x is not None)

    def _choose(self, rows: Tensor) -> None:
        if self.is_initialized:
            self._change(lambda x: x.index_select(0, rows.to(x.device)))

    def _move(self, device: torch.device) -> None:
        if self.is_initialized:
            self._change(lambda x: x.to(device, non_blocking=True))

    def _change(self, change: Callable[[Tensor], Tensor]) -> None:
        self.decoder = None  # of the tensors as they were
        self.count = change(self.count)
        if self.keys is not None:
            self.keys, self.values = change(self.keys), change(self.values)
        if self.state is not None:
            self.state = {name: change(x) for name, x in self.state.items()}
        if self.past is not None:
            self.past = _Past(self)  # tokens from before cannot be taken back any more


@dataclasses.dataclass(frozen=True)
class _Step:
    """What came in with one attention call."""

    mechanism: Mechanism
    q: Tensor
    k: Tensor
    v: Tensor
    real: Tensor | None
    rotary: Angles | None
    skipped: Tensor | None

    @property
    def length(self) -> int:
        return self.q.shape[2]

    def first(self, tokens: int) -> "_Step":
        real = None if self.real is None else self.real[:, :tokens]
        rotary = None if self.rotary is None else (self.rotary[0][:, :tokens], self.rotary[1][:, :tokens])
        q, k, v = (x[:, :, :tokens] for x in (self.q, self.k, self.v))
        return _Step(self.mechanism, q, k, v, real, rotary, self.skipped)


class _Past:
    """A state as it was, and what came in since: enough to compute it again without the last tokens."""

    def __init__(self, layer: MixedLayer):
        # Copied, because a state is overwritten as it moves on.
        self.state = None if layer.state is None else {name: x.clone() for name, x in layer.state.items()}
        self.count = layer.count
        self.steps: list[_Step] = []

    @property
    def tokens(self) -> int:
        return sum(step.length for step in self.steps)

    def first(self, tokens: int) -> list[_Step]:
        """The steps until so many tokens, the last one cut."""
        found = []
        for step in self.steps:
            if tokens > 0:
                found.append(step.first(min(tokens, step.length)))
            tokens -= step.length
        return found


class MixedLayerBesideState(LinearAttentionLayer, MixedLayer):
    """For layers that run attention beside a state-space mixer of their own (Falcon-H1, Zamba): both parts' caches."""

    is_compileable = False
    is_croppable = False  # pyright: ignore[reportAssignmentType]

    def __init__(self, groups: Int[Tensor, " g"], layer: int, heads: Int[Tensor, " n"] | None, states: int):
        MixedLayer.__init__(self, groups, layer, heads)
        LinearAttentionLayer.__init__(self, number_of_states=states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """The state-space part passes its tensors by name, attention by place."""
        if args:
            MixedLayer.lazy_initialization(self, *args)
        else:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)

    def offload(self) -> None:
        MixedLayer.offload(self)
        LinearAttentionLayer.offload(self)

    def prefetch(self) -> None:
        MixedLayer.prefetch(self)
        LinearAttentionLayer.prefetch(self)

    def reset(self) -> None:
        LinearAttentionLayer.reset(self)
        MixedLayer.reset(self)

    def reorder_cache(self, beam_idx: Int[Tensor, " n"]) -> None:
        LinearAttentionLayer.reorder_cache(self, beam_idx)  # pyright: ignore[reportArgumentType]
        MixedLayer.reorder_cache(self, beam_idx)

    def get_max_length(self) -> int:
        return -1

    def activate_past_recording(self) -> None:
        raise AttngapError("A converted layer beside a state-space mixer cannot take tokens back. Decode plainly")

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        if tokens_to_remove:
            self.activate_past_recording()


def pending(layer: int) -> MixedLayer | None:
    """The cache layer that was just updated and waits for its attention call; None when there is no cache."""
    found = getattr(_HERE, "layer", None)
    _HERE.layer = None
    if found is not None and found.layer != layer:
        raise AttngapError(
            f"Layer {layer} attends right after the cache of layer {found.layer} was filled; this model's cache cannot "
            "be followed. Generate with use_cache=False"
        )
    return found


def waiting(layer: int) -> MixedLayer | None:
    """The same without taking it; None also where another layer waits."""
    found = getattr(_HERE, "layer", None)
    return found if found is not None and found.layer == layer else None


def forget_pending() -> None:
    """A new forward pass: an earlier one may have ended in an error between cache and attention."""
    _HERE.layer = None
