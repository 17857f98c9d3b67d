"""The cache of a converted model: a layer of its own wherever heads were replaced, and how large it is."""

from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from attngap.errors import AttngapError
from attngap.models.compat import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    own_cache,
    state_tensors,
    tokens_in,
)
from attngap.models.mixed_layer import MixedLayer, MixedLayerBesideState


class Place(NamedTuple):
    """What a layer of the cache is for: see `MixedLayer`."""

    layer: int
    groups: Int[Tensor, " g"]
    heads: Int[Tensor, " n"] | None


def install(cache: Cache, places: dict[int, Place]) -> None:
    """Give a cache that is still empty a mixed layer wherever heads were replaced, by the cache's own index."""
    cache = own_cache(cache)
    if all(index < len(cache.layers) and isinstance(cache.layers[index], MixedLayer) for index in places):
        return
    if type(cache) is not DynamicCache or tokens_in(cache):
        raise AttngapError(
            f"A converted model needs a new DynamicCache, got a {type(cache).__name__} with "
            f"{tokens_in(cache)} tokens of another model or kind. Leave cache_implementation unset, or pass "
            "past_key_values=DynamicCache(config=model.config)"
        )
    if cache.offloading:  # between update and attention it would take away the states that attention reads
        raise AttngapError(
            "A converted model keeps its cache where it computes, and cannot offload it: its states are small. "
            "Leave cache_implementation unset"
        )
    for index, (layer, kept, heads) in places.items():
        while len(cache.layers) <= index:
            cache.layers.append(DynamicLayer())
        before = cache.layers[index]
        if isinstance(before, LinearAttentionAndFullAttentionLayer):
            cache.layers[index] = MixedLayerBesideState(kept, layer, heads, before.number_of_states)
        else:
            cache.layers[index] = MixedLayer(kept, layer, heads)


def fill(cache: Cache, context: int, generator: torch.Generator) -> None:
    """Pretend that a cache which holds a few tokens holds `context`: the others are random keys and values.

    A sliding window holds no more than its window, and a layer with a state of its own holds that state.
    """
    for layer in own_cache(cache).layers:
        if not isinstance(layer, CacheLayerMixin):
            continue
        more, room = context - layer.get_seq_length(), context
        if isinstance(layer, DynamicSlidingWindowLayer):
            room = min(context, layer.sliding_window - 1)
            layer.cumulative_length += more
        if isinstance(layer, MixedLayer):
            layer.seen += more
            layer.count = layer.count + more
        for name, held in (("keys", layer.keys), ("values", layer.values)):
            if held is not None:
                new = torch.randn(*held.shape[:2], room - held.shape[2], held.shape[3], generator=generator).to(held)
                setattr(layer, name, torch.cat((held, new), 2))


def cache_bytes(cache: Cache) -> int:
    """Bytes of keys, values and states in a cache of either kind."""
    total = 0
    for layer in own_cache(cache).layers:
        held = state_tensors(layer)
        if isinstance(layer, MixedLayer):
            total += layer.bytes()
        elif isinstance(layer, CacheLayerMixin):
            held = [*held, *(x for x in (layer.keys, layer.values) if x is not None)]
        total += sum(x.numel() * x.element_size() for x in held)
    return total
