import dataclasses

import pytest
import torch
from torch.nn import functional as F

from attngap.errors import AttngapError
from attngap.mechanisms.catalogue import catalogue, mechanism
from attngap.probes.mixers import match_state, parse
from attngap.probes.model import Decoder, ModelOptions, Projection, Rotary, replicate
from attngap.probes.tasks.base import stream
from attngap.probes.tasks.catalogue import task

SMALL = ModelOptions(width=16, heads=2, layers=2, positions="rotary", conv=3, mlp=2)


def decoder(text="elu", options=SMALL, name="copy"):
    return Decoder(task(name), parse(text), options)


@pytest.mark.parametrize("positions", ["none", "learned", "rotary"])
@pytest.mark.parametrize("name", ["copy", "icl-regression"])
def test_nothing_looks_ahead(positions, name):
    model = decoder("softmax+elu", dataclasses.replace(SMALL, positions=positions), name)
    inputs = task(name).sample(2, stream("x", 0)).inputs
    everywhere = torch.arange(inputs.shape[1]).expand(2, -1)
    changed = inputs.clone()
    changed[:, 20:] = inputs[:, 20:].flip(0)
    before, after = model(inputs, everywhere), model(changed, everywhere)
    torch.testing.assert_close(before[:, :20], after[:, :20])
    assert not torch.allclose(before[:, 20:], after[:, 20:])


def test_asking_at_some_places_changes_nothing():
    model = decoder()
    inputs = task("copy").sample(3, stream("x", 0)).inputs
    everywhere = torch.arange(inputs.shape[1]).expand(3, -1)
    where = torch.tensor([[5, 2], [0, 40], [7, 7]])
    whole = model(inputs, everywhere)
    torch.testing.assert_close(model(inputs, where), whole[torch.arange(3)[:, None], where])


def test_projection_is_linear_then_conv1d_then_silu():
    project = Projection(6, 10, 4)
    x = torch.randn(2, 9, 6)
    kernel = project.taps.flip(0).T[:, None]  # (channels, 1, taps), oldest first
    convolved = F.conv1d(F.pad(F.linear(x, project.weight).mT, (3, 0)), kernel, groups=10).mT
    torch.testing.assert_close(project(x), F.silu(convolved))


def test_projection_without_taps_is_linear():
    project = Projection(6, 10, 0)
    x = torch.randn(2, 9, 6)
    torch.testing.assert_close(project(x), x @ project.weight.T)


def test_rotary_products_depend_on_the_distance_only():
    rotary = Rotary(8, 32)
    q, k = torch.randn(8).expand(1, 1, 32, 8), torch.randn(8).expand(1, 1, 32, 8)
    products = (rotary(q) @ rotary(k).mT)[0, 0]
    torch.testing.assert_close(products.diagonal(-3), products[3, 0].expand(29), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(products[3, 0], products[4, 0])


def test_state_and_parameters_are_counted():
    model = decoder("elu")
    one = mechanism("elu", 2, 8)
    assert model.state_floats(10) == 2 * 2 * one.state_floats(10)
    assert model.state_rank(10) == 2 * one.state_rank(10)
    assert model.parameter_count == sum(p.numel() for p in set(model.parameters()))


def test_one_mechanism_a_layer():
    model = decoder("elu+softmax")
    assert [layer.mechanism.name for layer in model.mixers] == ["elu", "softmax"]
    with pytest.raises(AttngapError, match=r"one mechanism or one a layer \(2\), got 3"):
        decoder("elu+elu+elu")


@pytest.mark.parametrize("name", [name for name in catalogue() if name != "softmax"])
def test_states_are_matched(name):
    sizes = ModelOptions(width=64, heads=2, layers=1)
    matched = match_state("hybrid:window=4" if name == "hybrid" else name, sizes, 64, 6000)
    make = parse("hybrid:window=4" if name == "hybrid" else name)[0]
    floats = 2 * make(matched).state_floats(64)
    assert 0.75 * 6000 <= floats <= 1.25 * 6000


def test_softmax_has_no_state_to_match():
    assert match_state("softmax", SMALL, 64, 100) == SMALL


def test_a_state_that_cannot_be_matched():
    with pytest.raises(AttngapError, match="elu: no head_dim brings its state near 3 floats; the nearest is 2 with"):
        match_state("elu", SMALL, 64, 3)


def test_an_object_is_copied_for_every_layer_and_must_fit():
    own = mechanism("hedgehog", 2, 8)
    model = Decoder(task("copy"), [replicate(own)], SMALL)
    first, second = (list(layer.mechanism.parameters()) for layer in model.mixers)
    assert all(a is not b and torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(
        AttngapError, match=r"made for \(heads, dim, value_dim\) = \(4, 8, 8\), but the probe's model has"
    ):
        Decoder(task("copy"), [replicate(mechanism("elu", 4, 8))], SMALL)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 0}, "width must be at least 1, got 0"),
        ({"conv": -1}, "conv must be at least 0, got -1"),
        ({"width": 10, "heads": 3}, "heads must divide width, got 3 heads and width 10"),
        ({"positions": "rotery"}, "No kind of positions 'rotery'. Did you mean 'rotary'"),
        ({"positions": "rotary", "head_dim": 5}, "rotary positions need an even head_dim, got 5"),
    ],
)
def test_bad_sizes(options, message):
    with pytest.raises(AttngapError, match=message):
        ModelOptions(**options)


def test_bad_text():
    with pytest.raises(AttngapError, match=r"No mechanism 'gal'\. Did you mean 'gla'"):
        parse("softmax+gal")
    with pytest.raises(AttngapError, match="'degree' is not option=value"):
        parse("polynomial:degree")
