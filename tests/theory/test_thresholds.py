import math

import pytest
import torch

from attngap.mechanisms.catalogue import catalogue, mechanism, mechanism_class
from attngap.theory.critical import needle_for
from attngap.theory.thresholds import DIM, Bench, selectivity


@pytest.fixture(scope="module")
def bench():
    return Bench.of(256)


def test_softmax_is_where_the_law_says(bench):
    predicted = needle_for("softmax", 0.5, n=256, d=130, a0=0.05, b=0.5, m=40)
    found = selectivity("softmax", bench)
    assert found.needle == pytest.approx(predicted, abs=0.03)
    assert not found.fitted
    assert not found.rescaled


def test_polynomials_move_out_and_linear_never_separates(bench):
    later = Bench.of(1024)
    for degree in (4, 8):
        assert (
            selectivity("polynomial", bench, degree=degree).needle
            < selectivity("polynomial", later, degree=degree).needle
        )
    for name in ("linear", "relu", "elu"):
        assert selectivity(name, bench).needle == math.inf


def test_learned_maps_are_fitted_and_say_so():
    small = Bench.of(128)
    fitted = selectivity("prototype", small)
    assert fitted.fitted
    assert fitted.needle < 1.0


@pytest.mark.parametrize("name", catalogue())
def test_outputs_are_the_weights_times_the_tokens(name):
    bench = Bench.of(64, d=10)
    gate = {"model_dim": 10} if mechanism_class(name).gated else {}
    made = mechanism(name, 1, DIM, 11, **gate).double()
    x, q, k, v = bench.inputs([0.7])
    with torch.no_grad():
        weights = made.weights(made.read(x if made.gated else None, q, k, v))[0, 0, -1]
        expected = weights @ x[0] if made.normalized else weights @ x[0] / weights.sum()
        assert torch.allclose(bench.outputs(made, [0.7])[0], expected, atol=1e-9)
