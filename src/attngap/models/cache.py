"""The cache of a converted layer: full keys and values for groups that keep softmax, a state of constant size for all.

`update` hands back only the new keys and values, and travels with them, so that the attention function finds the state.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, EncoderDecoderCache

from attngap.errors import AttngapError
from attngap.mechanisms.base import State

_CARRIER = "_attngap_cache"
SPARE = 64  # tokens of room behind the keys and values held in full: they are moved once in so many tokens, not at each


class MixedLayer(CacheLayerMixin):
    """Bounded memory for replaced heads; `groups` are the key heads whose full cache some kept head still reads."""

    is_croppable = False  # a state cannot forget the last token
    is_sliding = False
    supports_early_init = False
    keys: Any  # (b, g, seen, d), None before the first update like the two below
    values: Any
    count: Any  # (b,) real tokens seen, padding left out

    def __init__(self, groups: Int[Tensor, " g"]):
        super().__init__()
        self.groups = groups
        self.state: State | None = None
        self.room: dict[str, Tensor] = {}  # what keys and values are the beginning of
        self.count = None
        self.seen = 0  # tokens seen, padding included
        self.unread = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.groups = self.groups.to(self.device)
        self.keys = key_states[:, self.groups, :0]
        self.values = value_states[:, self.groups, :0]
        self.count = torch.zeros(len(key_states), dtype=torch.long, device=self.device)
        self.is_initialized = True

    def update(
        self,
        key_states: Float[Tensor, "b h_kv t d"],
        value_states: Float[Tensor, "b h_kv t dv"],
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        if self.unread:
            raise AttngapError(
                "This model changes its keys between cache and attention, so a converted cache cannot reach its heads. "
                "Generate with use_cache=False"
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if len(self.groups):
            self.keys = self._append("keys", self.keys, key_states[:, self.groups])
            self.values = self._append("values", self.values, value_states[:, self.groups])
        self.seen += key_states.shape[2]
        self.unread = True
        carrier = key_states.view_as(key_states)  # a tensor of its own to hang the cache on
        setattr(carrier, _CARRIER, self)
        return carrier, value_states

    def _append(self, name: str, held: Tensor, new: Tensor) -> Tensor:
        if held.requires_grad or new.requires_grad:
            return torch.cat((held, new), 2)
        before, after = held.shape[2], held.shape[2] + new.shape[2]
        room = self.room.get(name)
        if room is None or room.data_ptr() != held.data_ptr() or room.shape[2] < after:
            room = held.new_empty(*held.shape[:2], after + SPARE, held.shape[3])
            room[:, :, :before] = held
            self.room[name] = room
        room[:, :, before:after] = new
        return room[:, :, :after]

    def advance(self, state: State, real: Tensor | None, length: int) -> None:
        """Keep the state after `length` new tokens, of which `real` are no padding."""
        self.state = state
        self.count = self.count + (length if real is None else real.sum(1))
        self.unread = False

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.keys = self.values = self.state = self.count = None
        self.room = {}
        self.is_initialized, self.unread, self.seen = False, False, 0

    def reorder_cache(self, beam_idx: Int[Tensor, " n"]) -> None:
        self._choose(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            self._choose(torch.arange(len(self.keys), device=self.device).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Int[Tensor, " n"]) -> None:
        self._choose(indices)

    def offload(self) -> None:
        self._move(torch.device("cpu"))

    def prefetch(self) -> None:
        if self.is_initialized:
            self._move(self.device)

    def bytes(self) -> int:
        """Bytes of keys and values with their spare room, counts and state."""
        full = [self.room.get("keys", self.keys), self.room.get("values", self.values)]
        held = [*full, self.count, *(self.state or {}).values()]
        return sum(x.numel() * x.element_size() for x in held if x is not None)

    def _choose(self, rows: Tensor) -> None:
        if self.is_initialized:
            self._apply(lambda x: x.index_select(0, rows.to(x.device)))

    def _move(self, device: torch.device) -> None:
        if self.is_initialized:
            self._apply(lambda x: x.to(device, non_blocking=True))

    def _apply(self, change) -> None:
        self.keys, self.values, self.count = (change(x) for x in (self.keys, self.values, self.count))
        self.room = {}  # of the tensors as they were
        if self.state is not None:
            self.state = {name: change(x) for name, x in self.state.items()}


def cache_of(key: Tensor) -> MixedLayer | None:
    """The cache layer that handed out these keys, if any."""
    return getattr(key, _CARRIER, None)


def install(cache: Cache, groups: dict[int, Int[Tensor, " g"]]) -> None:
    """Give a cache that is still empty a mixed layer wherever heads were replaced; `groups` by the layer's index."""
    cache = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    if all(index < len(cache.layers) and isinstance(cache.layers[index], MixedLayer) for index in groups):
        return
    if type(cache) is not DynamicCache or cache.get_seq_length():
        raise AttngapError(
            f"A converted model needs a new DynamicCache, got a {type(cache).__name__} with "
            f"{cache.get_seq_length()} tokens of another model or kind. Leave cache_implementation unset, or pass "
            "past_key_values=DynamicCache()"
        )
    for index, kept in groups.items():
        while len(cache.layers) <= index:
            cache.layers.append(DynamicLayer())
        cache.layers[index] = MixedLayer(kept)


def cache_bytes(cache: Cache) -> int:
    """Bytes of keys, values and states in a cache of either kind."""
    total = 0
    for layer in cache.layers:
        if isinstance(layer, MixedLayer):
            total += layer.bytes()
        elif isinstance(layer, CacheLayerMixin):
            total += sum(x.numel() * x.element_size() for x in (layer.keys, layer.values) if x is not None)
    return total
