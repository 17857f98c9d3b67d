"""A slice read after the original's past is what the whole passage gives there."""

import torch

from attngap.conversion.choose import convert
from attngap.conversion.slices import Slice, SliceReference, read_past, read_slice, states_give_logits, teacher_logits
from attngap.heads import chain
from attngap.heads.damage import frozen
from attngap.models.positions import layer_positions
from tests.zoo import VOCABULARY, mechanisms, tiny

TOKENS = torch.randint(5, VOCABULARY, (1, 70), generator=torch.Generator().manual_seed(0))


def world():
    model = tiny()
    rotary = layer_positions(model)[0].options()["rotary"]
    return model, mechanisms(model, map_options={"decay": True}, rotary=rotary)


def test_with_every_head_kept_a_slice_is_what_the_model_says():
    model, parts = world()
    piece = Slice(read_past(model, TOKENS), 50, 70)
    with torch.no_grad():
        expected = model(input_ids=TOKENS).logits[:, 50:]
        found = read_slice(model, parts, piece, None)
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=1e-2)  # the past is held in half precision


def test_in_the_last_layer_a_slice_is_what_the_converted_model_says():
    """There the past has no replaced head before it."""
    model, parts = world()
    last = {1: parts[1]}
    piece = Slice(read_past(model, TOKENS), 50, 70)
    keep = frozenset({(1, 2)})
    with torch.no_grad():
        expected = convert(model, last, keep)(input_ids=TOKENS).logits[:, 50:]
        found = read_slice(model, last, piece, keep)
        untouched = model(input_ids=TOKENS).logits[:, 50:]
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=1e-2)
    assert (untouched - expected).abs().max() > 0.05


def test_gains_and_damage_tell_the_head_that_matters():
    """Measured by trading each head for real."""
    model, parts = world()
    past = read_past(model, TOKENS)
    reference = SliceReference(model, parts, [Slice(past, 40, 70)])
    every = frozenset((layer, head) for layer in parts for head in range(4))
    assert float(reference.divergence(every)) < 1e-4
    damage = sum((torch.tensor([list(reference.head_damage(seed=s).values())]) for s in range(20)), torch.zeros(1, 8))
    real = torch.tensor([float(reference.divergence(every - {head})) for head in sorted(every)])
    order = torch.stack((damage[0], real)).argsort().argsort().float()
    assert float(torch.corrcoef(order)[0, 1]) > 0.7
    gains, losses = reference.softmax_gains(frozenset({(0, 0)}))
    assert set(gains) == set(every)
    assert float(losses) > 0


def test_gradients_of_a_slice_reach_the_features_of_its_past():
    model, parts = world()
    reference = SliceReference(model, parts, [Slice(read_past(model, TOKENS), 50, 70)])
    reference.loss(reference.pieces[0], frozenset()).backward()
    for part in parts.values():
        for name, p in part.named_parameters():
            assert p.grad is not None, name
            assert p.grad.abs().sum() > 0, name


def test_what_the_original_says_comes_from_its_last_states():
    model, parts = world()
    past = read_past(model, TOKENS)
    assert past.states is not None
    with torch.no_grad():
        expected = model(input_ids=TOKENS).logits[:, 50:]
    torch.testing.assert_close(teacher_logits(model, parts, Slice(past, 50, 70)), expected)


def test_where_logits_are_scaled_the_original_reads_the_slice_anew(monkeypatch):
    model, parts = world()
    whole = type(model).forward

    def scaled(self, *args, **named):
        found = whole(self, *args, **named)
        found.logits = found.logits * 2
        return found

    monkeypatch.setattr(type(model), "forward", scaled)
    assert not states_give_logits(model, TOKENS[:, :8])
    past = read_past(model, TOKENS)
    assert past.states is None
    with torch.no_grad():
        expected = model(input_ids=TOKENS).logits[:, 50:]
    found = teacher_logits(model, parts, Slice(past, 50, 70))
    torch.testing.assert_close(found, expected, atol=4e-2, rtol=1e-2)  # the past is held in half precision


def test_gains_of_some_heads_are_those_of_all():
    """Softmax of heads that nobody asks about is not computed."""
    model, parts = world()
    reference = SliceReference(model, parts, [Slice(read_past(model, TOKENS), 40, 70)])
    keep = frozenset({(0, 0), (1, 2), (1, 3)})
    some, losses = reference.softmax_gains(keep, keep)
    every, again = reference.softmax_gains(keep)
    assert set(some) == set(keep)
    torch.testing.assert_close(losses, again)
    ratio = [some[head] / every[head] for head in sorted(keep)]  # each is a share of what was asked for
    assert max(ratio) / min(ratio) < 1.001


def test_states_after_the_past_are_made_anew_once_replacements_change():
    model, parts = world()
    reference = SliceReference(model, parts, [Slice(read_past(model, TOKENS), 50, 70)])
    before = reference.divergence(frozenset())
    with torch.no_grad():
        parts[0].feature_map.key_bias.add_(3.0)
    stale = reference.divergence(frozenset())
    reference.forget()
    fresh = reference.divergence(frozenset())
    whole = SliceReference(model, parts, reference.pieces).divergence(frozenset())
    torch.testing.assert_close(fresh, whole)
    assert not torch.allclose(stale, fresh)
    assert not torch.allclose(before, fresh)


def test_computed_again_layer_by_layer_gains_and_gradients_are_the_same(monkeypatch):
    model, parts = world()
    reference = SliceReference(model, parts, [Slice(read_past(model, TOKENS), 40, 70)])
    keep, ran = frozenset({(0, 0), (1, 2), (1, 3)}), []
    hook = model.model.layers[1].mlp.register_forward_hook(lambda *_: ran.append(1))

    def everything():
        ran.clear()
        damage, (gains, losses) = reference.head_damage(), reference.softmax_gains(keep)
        for part in parts.values():
            part.zero_grad()
        with frozen(model):
            reference.loss(reference.pieces[0], keep).backward()
        grads = [p.grad.clone() for part in parts.values() for p in part.parameters()]
        return torch.tensor([*damage.values(), *gains.values(), *losses.tolist()]), grads, len(ran)

    whole, whole_grads, few = everything()
    monkeypatch.setattr(chain, "WHOLE_GRAPH", 0)
    again, again_grads, many = everything()
    hook.remove()
    torch.testing.assert_close(again, whole)
    torch.testing.assert_close(again_grads, whole_grads)
    assert many > few  # it really was computed again
    assert not any("forward" in vars(layer) for layer in model.model.layers)
