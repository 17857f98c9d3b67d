"""The damage estimate is the KL divergence of a small change, and leaves the model as it was."""

import functools

import pytest
import torch

from attngap.heads.damage import CAP, SPAN, draw_labels, label_directions, projections, random_directions, score
from attngap.heads.forward import embedding, forward, is_language_model
from attngap.models.capture import capture
from tests import zoo

HEAD, TOKEN, LAYER, SIZE = 2, 5, 1, 0.02


def one_token(call):
    """A change of one head's output at one token; the same whenever it is asked for."""
    change = torch.zeros_like(call.output[0])
    if call.layer == LAYER:
        change[HEAD, TOKEN] = SIZE * torch.linspace(-1, 1, change.shape[-1]) * call.output.abs().mean()
    return change


def projected(model, ids, change=one_token, *, draws, seed=0):
    """Of labels for a language model, of the embedding for an encoder."""
    generator = torch.Generator().manual_seed(seed)
    if is_language_model(model):
        read, directions = lambda: forward(model, ids).logits, label_directions
    else:
        read, directions = lambda: embedding(forward(model, ids)), random_directions
    return projections(model, read, change, functools.partial(directions, draws=draws), generator)


def measured(model, ids):
    """What really happens, by replacing the output."""
    with torch.no_grad():
        before = forward(model, ids)
        with capture(model, lambda call: call.output + one_token(call)):
            after = forward(model, ids)
    return before, after


def test_labels_give_the_kl_divergence_in_nats_a_token():
    model, ids = zoo.tiny("llama").double(), zoo.tokens(1, 12)
    before, after = (out.logits.log_softmax(-1) for out in measured(model, ids))
    kl = (before.exp() * (before - after)).sum() / 12
    found = projected(model, ids, draws=600)
    estimate = score(found[LAYER], is_language_model=True)
    assert estimate.shape == (4,)
    assert 0.85 < float(estimate[HEAD] / kl) < 1.15
    assert estimate[[0, 1, 3]].abs().max() == 0
    assert found[0].abs().max() == 0


def test_one_wild_token_does_not_decide_the_damage_of_a_head():
    wild = torch.zeros(1, 1, 200)
    wild[0, 0, [0, 150]] = torch.tensor([0.2, 50.0])
    assert score(wild, is_language_model=True).item() == pytest.approx((0.02 + CAP) / 200)
    assert score(wild, is_language_model=False).item() == pytest.approx(50.2**2)


def test_changes_of_nearby_tokens_add_up_before_they_are_squared():
    """Against the sum over pairs, written out."""
    x = torch.randn(2, 3, 100, generator=torch.Generator().manual_seed(0)).clamp(-2, 2)
    apart = (torch.arange(100)[:, None] - torch.arange(100)).abs()
    pairs = torch.einsum("dhs,dht,st->dh", x, x, (1 - apart / SPAN).clamp(min=0))
    assert torch.allclose(score(x, is_language_model=True), pairs.mean(0) / 200, atol=1e-5)


def test_encoders_give_the_squared_change_of_the_embedding():
    model, ids = zoo.tiny("bert").double(), zoo.tokens(1, 12)
    before, after = (embedding(out) for out in measured(model, ids))
    moved = (before - after).square().sum()
    found = projected(model, ids, draws=600)
    estimate = score(found[LAYER], is_language_model=False)[HEAD]
    assert 0.85 < float(estimate / moved) < 1.15


def test_a_longer_list_of_changes_is_projected_at_once():
    model, ids = zoo.tiny("llama"), zoo.tokens(1, 12)
    both = projected(model, ids, lambda call: torch.stack([one_token(call), 2 * one_token(call)]), draws=2)
    assert both[LAYER].shape == (2, 2, 4, 12)
    assert torch.allclose(both[LAYER][:, 1], 2 * both[LAYER][:, 0])


def test_gradients_that_are_shown_are_those_of_the_loss():
    """Against automatic differentiation of the drawn labels' log-probability, through torch's own loss."""
    model, ids = zoo.tiny("llama").double(), zoo.tokens(1, 12)
    shown, generator = {}, torch.Generator().manual_seed(4)
    read = lambda: forward(model, ids).logits  # noqa: E731
    projections(model, read, one_token, label_directions, generator, observe=shown.__setitem__)
    labels = draw_labels(read().softmax(-1), 1, torch.Generator().manual_seed(4))[..., 0]
    leaves = {}

    def add_leaf(call):
        leaves[call.layer] = torch.zeros_like(call.output, requires_grad=True)
        return call.output + leaves[call.layer]

    with capture(model, add_leaf):
        loss = torch.nn.functional.cross_entropy(read()[0], labels[0], reduction="sum")
        grads = torch.autograd.grad(-loss, list(leaves.values()))
    assert set(shown) == set(leaves)
    assert all(torch.allclose(shown[layer], grad[0]) for layer, grad in zip(leaves, grads, strict=True))


def test_the_model_keeps_its_gradients_and_draws_repeat():
    model, ids = zoo.tiny("llama"), zoo.tokens(1, 12)
    model.lm_head.weight.requires_grad_(False)
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    first = projected(model, ids, draws=3, seed=1)
    again = projected(model, ids, draws=3, seed=1)
    other = projected(model, ids, draws=3, seed=2)
    assert torch.equal(first[LAYER], again[LAYER])
    assert not torch.equal(first[LAYER], other[LAYER])
    assert {name: p.requires_grad for name, p in model.named_parameters()} == before
    assert all(p.grad is None for p in model.parameters())
