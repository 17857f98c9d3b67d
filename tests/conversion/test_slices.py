"""A slice read after the original's past is what the whole passage gives there."""

import torch

from attngap.conversion.choose import convert
from attngap.conversion.slices import Slice, SliceReference, read_past, read_slice
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
    ((piece, teacher),) = reference.pairs()
    reference.loss(piece, teacher, frozenset()).backward()
    for part in parts.values():
        for name, p in part.named_parameters():
            assert p.grad is not None, name
            assert p.grad.abs().sum() > 0, name
