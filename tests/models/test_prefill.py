"""A prompt that every head has read with softmax, against the original that reads it so."""

import copy

import pytest
import torch

from attngap.errors import AttngapError
from attngap.heads.replacement import build_replacement, window_only
from attngap.mechanisms.catalogue import mechanism
from attngap.models.cache import cache_bytes
from attngap.models.mixed_layer import MixedLayer
from attngap.models.plan import Replacement
from attngap.models.positions import layer_positions
from attngap.models.prefill import exact_prefill
from attngap.models.shapes import layer_shapes
from attngap.models.swap import empty_cache, swap
from tests import zoo


def featured(model, window=8):
    planned, where = Replacement(feature_map="hedgehog", features=None, window=window, sinks=2), layer_positions(model)
    return {s.layer: build_replacement(s, planned, positions=where[s.layer])[0] for s in layer_shapes(model)}


@torch.no_grad()
def own_cache_after(converted, tokens):
    cache = empty_cache(converted)
    converted(input_ids=tokens, past_key_values=cache, use_cache=True)
    return cache


@torch.no_grad()
def test_a_window_over_all_of_it_goes_on_as_the_original_does():
    model, tokens = zoo.tiny("llama"), zoo.tokens(2, 40)
    near = {shape.layer: (window_only(shape, 64, 4), [2]) for shape in layer_shapes(model)}
    converted = swap(model, {0: near[0]})  # the other layer stays as it was
    cache = exact_prefill(converted, tokens[:, :30])
    found = converted(input_ids=tokens[:, 30:], past_key_values=cache).logits
    torch.testing.assert_close(found, model(input_ids=tokens).logits[:, 30:], atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_states_are_of_the_keys_that_the_original_has():
    model, tokens = zoo.tiny("llama"), zoo.tokens(1, 40)
    converted = swap(model, {i: (m, [1]) for i, m in featured(model).items()})
    exact, own = exact_prefill(converted, tokens, held=0.0), own_cache_after(converted, tokens)
    assert cache_bytes(exact) == cache_bytes(own)
    first, second = exact.layers
    assert isinstance(first, MixedLayer)
    for name, value in own.layers[0].state.items():  # what the first layer reads is exact either way
        torch.testing.assert_close(first.state[name], value, atol=1e-5, rtol=1e-4)
    truth = swap(model, {1: (featured(model)[1], [1])})
    wanted = own_cache_after(truth, tokens).layers[1]  # here the layer before is the original's
    for name, value in wanted.state.items():
        torch.testing.assert_close(second.state[name], value, atol=1e-4, rtol=1e-3)
    assert (second.state["S"] - own.layers[1].state["S"]).abs().max() > 1e-3


@torch.no_grad()
def test_generation_goes_on_from_it():
    model, tokens = zoo.tiny("llama"), zoo.tokens(1, 40)
    near = {shape.layer: (window_only(shape, 64, 4), []) for shape in layer_shapes(model)}
    converted = swap(model, near)
    how = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    found = converted.generate(tokens, past_key_values=exact_prefill(converted, tokens[:, :-1]), **how)
    assert torch.equal(found, model.generate(tokens, **how))


def test_what_has_no_window_is_refused():
    model = zoo.tiny("llama")
    alone = {
        s.layer: (mechanism("elu", s.heads, s.dim, s.value_dim, kv_heads=s.kv_heads), []) for s in layer_shapes(model)
    }
    with pytest.raises(AttngapError, match="with a window, got elu"):
        exact_prefill(swap(model, alone), zoo.tokens(1, 8))
    with pytest.raises(AttngapError, match="got Llama"):
        exact_prefill(model, zoo.tokens(1, 8))


def exact_key_heads(model, held, narrowest, monkeypatch):
    """The cache after a prompt, and its first layer."""
    monkeypatch.setattr("attngap.models.prefill.NARROWEST", narrowest)
    cache = exact_prefill(model, zoo.tokens(1, 40), held)
    return cache, cache.layers[0]


@torch.no_grad()
def test_half_of_the_window_goes_to_tokens_that_are_missed(monkeypatch):
    model = zoo.tiny("llama")
    converted = swap(model, {i: (m, [1]) for i, m in featured(model).items()})
    plain, before = exact_key_heads(converted, 0.0, 2, monkeypatch)
    cache, layer = exact_key_heads(converted, 0.5, 2, monkeypatch)
    assert before.form is None
    assert layer.form == (4, 6)
    room = cache_bytes(plain) - cache_bytes(cache)
    assert 0 <= room < 4 * 2 * 4 * 8 * 2  # rows of cos and sin that a narrower window does not need, no more
    more = zoo.tokens(1, 60)[:, 40:]
    at_once = converted(input_ids=more, past_key_values=copy.deepcopy(cache)).logits
    rows = [converted(input_ids=more[:, i : i + 1], past_key_values=cache).logits for i in range(more.shape[1])]
    torch.testing.assert_close(torch.cat(rows, 1), at_once, atol=1e-5, rtol=1e-4)
    beams = cache.layers[0]
    beams.batch_repeat_interleave(2)
    assert beams.state["k"].shape[0] == 2
    cache.reset()
    assert cache.layers[0].form is None


@torch.no_grad()
def test_what_is_held_brings_the_next_token_nearer_to_the_original(monkeypatch):
    """As many tokens are left to the features either way; which ones is what differs."""
    model, tokens = zoo.tiny("llama"), zoo.tokens(2, 40)
    converted = swap(model, {i: (m, []) for i, m in featured(model, window=28).items()})
    monkeypatch.setattr("attngap.models.prefill.NARROWEST", 4)
    cache = exact_prefill(converted, tokens[:, :32], 0.7)
    assert cache.layers[0].form == (8, 22)
    found = converted(input_ids=tokens[:, 32:33], past_key_values=cache).logits
    want = model(input_ids=tokens[:, :33]).logits[:, -1:]
    few = exact_prefill(converted, tokens[:, :32], 0.0)
    other = converted(input_ids=tokens[:, 32:33], past_key_values=few).logits
    assert (found - want).abs().max() < (other - want).abs().max()
