"""A layer's certificates: the sandwich, and what the ceiling's weights do to the output."""

import numpy as np
import pytest
import torch

from attngap.diagnosis.bounds import CELLS, TENSORS, bounds, weighted_floors
from attngap.theory.certificates import ceiling, floor

RANKS = (2, 4, 8)


def weights(causal: bool, heads: int = 3, t: int = 40) -> torch.Tensor:
    logits = 3 * torch.randn(heads, t, t, generator=torch.Generator().manual_seed(0))
    if causal:
        logits = logits.masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), -torch.inf)
    return logits.softmax(-1)


@pytest.mark.parametrize("causal", [True, False])
def test_floor_and_ceiling_are_those_of_the_certificates(causal):
    a, v = weights(causal), torch.randn(3, 40, 5)
    found = bounds(a, v, RANKS, window=4, sinks=2, causal=causal)
    near = {"window": 4, "sinks": 2} if causal else {}
    for head in range(3):
        low = floor(a[head], RANKS, **near, causal=causal, cells=CELLS)
        high = ceiling(a[head], RANKS, **near, causal=causal)
        assert torch.equal(found.floor[head], low.relative)
        assert torch.equal(found.ceiling[head], high.relative)
        assert torch.allclose(found.far[head], low.far / low.whole)
        change = (high.weights - a[head].double()) @ v[head].double()
        assert torch.allclose(found.change[head].double(), change, atol=1e-5)
    assert (found.floor <= found.ceiling + 1e-12).all()
    assert (found.floor[:, :-1] >= found.floor[:, 1:]).all()


def test_the_mid_spectrum_is_that_of_the_far_block():
    a = weights(True)
    found = bounds(a, torch.randn(3, 40, 5), RANKS, window=4, sinks=2, causal=True)
    far = a[:, 6:, 2:36].tril()
    block = far[:, 17:, :18].double()
    exact = torch.linalg.svdvals(block)
    assert torch.allclose(found.spectrum.double()[:, : exact.shape[1]], exact, atol=1e-5)


def test_a_rank_beyond_the_tokens_costs_nothing():
    found = bounds(weights(True), torch.randn(3, 40, 5), (8, 500), window=4, sinks=2, causal=True)
    assert found.floor[:, 1].abs().max() == 0


def test_the_number_of_threads_is_restored():
    before = torch.get_num_threads()
    bounds(weights(True), torch.randn(3, 40, 5), RANKS, window=4, sinks=2, causal=True)
    assert torch.get_num_threads() == before


def test_processes_and_this_process_give_the_same_numbers(monkeypatch):
    monkeypatch.setattr("attngap.diagnosis.bounds.PARALLEL_FROM", 0)
    a, v = weights(True), torch.randn(3, 40, 5, generator=torch.Generator().manual_seed(1))
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            found.append(bounds(a, v, RANKS, window=4, sinks=2, causal=True))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(getattr(found[0], name), getattr(found[1], name)) for name in TENSORS)


@pytest.mark.parametrize("causal", [True, False])
def test_weighted_floors_bound_the_weighted_error_of_weights_of_that_rank(causal):
    """Against the definition: SVDs by numpy of the scaled matrix, and weights that were built at that rank."""
    generator = torch.Generator().manual_seed(2)
    a, v = weights(causal), torch.randn(3, 40, 5, generator=generator)
    s = torch.rand(3, 40, generator=generator)
    found = weighted_floors(a, s, v, RANKS, window=4, sinks=2, causal=causal)
    c = (v - v.mean(1, keepdim=True)).norm(dim=-1)
    near = {"window": 4, "sinks": 2} if causal else {}
    for head in range(3):
        scaled = s[head][:, None].double() * a[head].double() * c[head].double()
        for place, rank in enumerate(RANKS):
            built = ceiling(a[head], rank, **near, causal=causal).weights
            error = (s[head][:, None] * (a[head] - built) * c[head]).square().sum() / 80
            assert found[head, place] <= error + 1e-9
            if not causal:
                tail = np.square(np.linalg.svd(scaled.numpy(), compute_uv=False)[rank:]).sum() / 80
                assert found[head, place] == pytest.approx(tail, abs=1e-9)
    assert (found[:, 0] > 0).all()
    assert weighted_floors(a, 3 * s, v, RANKS, window=4, sinks=2, causal=causal) == pytest.approx(9 * found, rel=1e-6)
