import dataclasses

import pytest
import torch

from attngap import mechanism
from attngap.errors import AttngapError
from attngap.mechanisms.fit import FitOptions, _batches, fit_layer, init_prototypes
from attngap.ops.softmax.definition import softmax_attention

HYBRID = {"feature_map": "prototype", "window": 8, "sinks": 2, "relative": False, "gain": "query"}
OPTIONS = FitOptions(steps=30, check=10, sharpness=2.0)


def streams(passages=3, sharp=2.0):
    generator = torch.Generator().manual_seed(0)
    centers = torch.randn(200, 8, generator=generator)
    pick = torch.randint(200, (passages, 4, 64), generator=generator)
    q = sharp * (centers[pick] + 0.2 * torch.randn(passages, 4, 64, 8, generator=generator))
    k = torch.randn(passages, 2, 64, 8, generator=generator)
    v = torch.randn(passages, 2, 64, 8, generator=generator)
    return q, k, v, softmax_attention(q, k, v)


def new(name="hybrid", **options):
    torch.manual_seed(0)
    options = HYBRID | options if name == "hybrid" else options
    return mechanism(name, 4, 8, kv_heads=2, **options)


@pytest.mark.parametrize("name", ["hybrid", "prototype", "hedgehog"])
def test_fitting_lowers_the_held_out_error_of_the_untrained_mechanism(name):
    data = streams()
    untrained = fit_layer(new(name), *data, dataclasses.replace(OPTIONS, steps=0))
    fitted = new(name)
    error = fit_layer(fitted, *data, OPTIONS)
    assert error.mean() < untrained.mean()
    # What it reports is what the mechanism does on the passage it never saw.
    q, k, v, target = (x[-1:] for x in data)
    out = fitted(None, q, k, v)[0]
    energy = data[3].square().mean((0, 2, 3))
    torch.testing.assert_close((out - target).square().mean((0, 2, 3)) / energy, error, atol=1e-6, rtol=1e-4)


def test_prototypes_are_exact_where_queries_are_prototypes():
    q, k, v, _ = streams(passages=1)
    few = q[:, :, :5].repeat(1, 1, 13, 1)[:, :, :64]  # five distinct queries a head, ten a group
    target = softmax_attention(few, k, v)
    made = mechanism("prototype", 4, 8, kv_heads=2, features=64)
    init_prototypes(made, few, k, sharpness=100.0)
    torch.testing.assert_close(made(None, few, k, v)[0], target, atol=1e-4, rtol=1e-3)


def test_a_fit_repeats_to_the_bit_and_seeds_differ():
    data = streams()
    found = []
    for seed in (0, 0, 1):
        made = new()
        fit_layer(made, *data, dataclasses.replace(OPTIONS, seed=seed, batch=1, steps=5, check=5))
        found.append(made.feature_map.key_weight.detach().clone())
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_early_stopping_never_ends_worse_than_it_began():
    data = streams()
    wild = dataclasses.replace(OPTIONS, rate=0.5, steps=9, check=3)
    begun = fit_layer(new(), *data, dataclasses.replace(OPTIONS, steps=0))
    assert fit_layer(new(), *data, wild).sum() <= begun.sum() + 1e-6


def test_without_held_out_passages_the_error_is_of_all():
    data = streams(passages=1)
    assert fit_layer(new(), *data, dataclasses.replace(OPTIONS, heldout=0, steps=5)).isfinite().all()
    with pytest.raises(AttngapError, match="more passages than it holds out, got 1 and heldout=1"):
        fit_layer(new(), *data, OPTIONS)


def test_a_head_that_reads_nothing_far_begins_without_a_far_part():
    q, k, v, target = streams()
    near = new(feature_map="none", gain="none")(None, q, k, v)[0]
    half = torch.cat((near[:, :2], target[:, 2:]), 1)
    options = dataclasses.replace(OPTIONS, steps=0)
    begun = fit_layer(new(), q, k, v, half, dataclasses.replace(options, settle=False))
    settled = fit_layer(new(), q, k, v, half, options)
    assert (settled[:2] < 1e-3).all()
    assert (settled[2:] <= begun[2:] + 0.02).all()


def test_every_passage_is_fitted_to_before_any_comes_again():
    order = _batches([5], dataclasses.replace(OPTIONS, batch=2), torch.Generator().manual_seed(0))
    drawn = torch.cat([next(order)[1] for _ in range(5)])
    assert sorted(drawn[:5].tolist()) == sorted(drawn[5:].tolist()) == list(range(5))
