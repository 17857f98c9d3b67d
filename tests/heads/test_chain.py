"""Differentiated a layer at a time, a model gives what one graph through all of it gives, and holds one layer's."""

import functools

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from attngap.heads import chain, damage
from attngap.heads.damage import label_directions, projections, random_directions
from attngap.heads.forward import embedding, forward, is_language_model
from tests import zoo

CHAINED = ("llama", "gpt2", "bert")


def changes(call):
    return torch.sin(torch.arange(call.output[0].numel())).view_as(call.output[0]).to(call.output)


def found(model, *, draws=3, observe=None):
    ids, generator = zoo.tokens(1, 12), torch.Generator().manual_seed(0)
    if is_language_model(model):
        read, directions = lambda: forward(model, ids).logits, label_directions
    else:
        read, directions = lambda: embedding(forward(model, ids)), random_directions
    return projections(model, read, changes, functools.partial(directions, draws=draws), generator, observe)


@pytest.mark.parametrize("family", [*CHAINED, "albert", "t5"])
def test_a_layer_at_a_time_and_all_at_once_are_the_same(family, monkeypatch):
    model, seen, same = zoo.tiny(family).double(), {}, {}
    one = found(model, observe=seen.__setitem__)
    assert (model not in chain._UNCHAINED) == (family in CHAINED)
    monkeypatch.setattr(damage, "run_chain", lambda *_: None)
    whole = found(model, observe=same.__setitem__)
    assert list(one) == list(whole)
    assert one[0].abs().max() > 0
    for layer in whole:
        torch.testing.assert_close(one[layer], whole[layer], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(seen[layer], same[layer], rtol=1e-9, atol=1e-12)


class Held:
    """A tensor that a graph holds on to; counts those that are alive."""

    alive = most = 0

    def __init__(self, x):
        self.x = x.detach()  # an output that held its own graph would never go
        Held.alive += 1
        Held.most = max(Held.most, Held.alive)

    def __del__(self):
        Held.alive -= 1


def most_held(layers):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=96, num_hidden_layers=layers, **sizes)).eval()
    Held.alive = Held.most = 0
    with torch.autograd.graph.saved_tensors_hooks(Held, lambda held: held.x):
        found(model, draws=1)
    return Held.most


def test_what_graphs_hold_does_not_grow_with_the_depth(monkeypatch):
    assert most_held(8) == most_held(2)
    monkeypatch.setattr(damage, "run_chain", lambda *_: None)
    assert most_held(8) > 3 * most_held(2)


class TwoSums(torch.nn.Module):
    """A layer norm that adds what an earlier layer said: the output reads more than the last state."""

    def __init__(self, inner, model):
        super().__init__()
        self.inner, self.kept = inner, []
        model.model.layers[0].register_forward_hook(lambda *args: self.kept.append(args[2]))

    def forward(self, x):
        return self.inner(x + self.kept.pop())


def test_an_output_that_reads_an_earlier_layer_is_no_chain(monkeypatch):
    model = zoo.tiny("llama").double()
    model.model.norm = TwoSums(model.model.norm, model)
    one = found(model)
    assert model in chain._UNCHAINED
    monkeypatch.setattr(damage, "run_chain", lambda *_: None)
    for layer, each in found(model).items():
        torch.testing.assert_close(one[layer], each)
