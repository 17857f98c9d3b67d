import copy

import pytest
import torch

from attngap.mechanisms.variants.hybrid import Hybrid
from attngap.models.cache import cache_bytes
from attngap.models.compat import DynamicCache, own_cache, tokens_in
from attngap.models.mixed_layer import SPARE, MixedLayer
from attngap.models.pretended import FAR, PretendedCaches, prompt_length, reach
from attngap.models.shapes import layer_shapes
from attngap.models.swap import swap
from tests.zoo import tiny


def converted(*windows: int):
    """Layer i has the i-th window, with two sinks; the first head of each keeps softmax."""
    model = tiny()
    shapes = layer_shapes(model)
    mechanisms = [
        Hybrid(s.heads, s.dim, kv_heads=s.kv_heads, window=w, sinks=2) for s, w in zip(shapes, windows, strict=True)
    ]
    return swap(model, {i: (m.requires_grad_(False), [0]) for i, m in enumerate(mechanisms)})


def mixed_layers(cache) -> list[MixedLayer]:
    return [layer for layer in own_cache(cache).layers if isinstance(layer, MixedLayer)]


@pytest.mark.parametrize("windows", [(8, 8), (8, 512), (700, 16)])
def test_windows_of_any_size_are_full_and_features_are_in_use(windows):
    model = converted(*windows)
    cache = PretendedCaches(model).of(2000)
    layers = mixed_layers(cache)
    assert len(layers) == len(windows)
    for layer, window in zip(layers, windows, strict=True):
        assert int(layer.state["count"]) > 2 + window
        assert bool(layer.state["k"].abs().sum(-1).gt(0).all()), "a slot of the window was never written"
        assert float(layer.state["z"].abs().sum()) > 0, "no key has left the window, so features have nothing to read"
    assert tokens_in(cache) == 2000


def test_a_context_shorter_than_the_window_is_read_whole():
    model = converted(512, 8)
    cache = PretendedCaches(model).of(100)
    layer = mixed_layers(cache)[0]
    assert int(layer.state["count"]) == tokens_in(cache) == 100
    assert float(layer.state["z"].abs().sum()) == 0


def test_bytes_are_those_of_a_cache_that_read_everything():
    """But for the room that a real one has for tokens to come."""
    model = converted(40, 64)
    caches = PretendedCaches(model)
    for context in (20, 64 + 2 + FAR, 200, 150):
        real = DynamicCache(config=model.config)
        with torch.no_grad():
            model(torch.ones(1, context, dtype=torch.long), past_key_values=real, use_cache=True)
        held = sum(x.numel() * 4 for layer in mixed_layers(real) for x in (layer.keys, layer.values))
        spare = SPARE * held // context
        assert cache_bytes(real) - spare <= cache_bytes(caches.of(context)) <= cache_bytes(real)


def test_each_cache_is_its_own():
    """Decoding after one context must not change what the next one begins with."""
    model = converted(8, 8)
    caches = PretendedCaches(model)
    first = caches.of(300)
    before = [copy.deepcopy(layer.state) for layer in mixed_layers(caches.of(300))]
    with torch.no_grad():
        model(torch.zeros(1, 1, dtype=torch.long), past_key_values=first, position_ids=torch.tensor([[300]]))
    after = [layer.state for layer in mixed_layers(caches.of(300))]
    for a, b in zip(before, after, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_model_without_replaced_heads_needs_a_short_prompt():
    assert prompt_length(tiny()) == FAR
    assert prompt_length(converted(512, 8)) == 514 + FAR


def test_learned_positions_end_and_rotary_ones_do_not():
    assert reach(tiny("gpt2")) == tiny("gpt2").config.max_position_embeddings
    assert reach(tiny()) > 10**6
