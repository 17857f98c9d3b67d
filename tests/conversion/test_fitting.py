"""Layers that are fitted while the model runs."""

import pytest
import torch

from attngap.conversion.fitting import fit_all
from attngap.engine import cluster
from attngap.errors import AttngapError
from attngap.heads.replacement import build_replacement
from attngap.mechanisms.fit import FitOptions
from attngap.models.shapes import layer_shapes
from attngap.storage.checkpoint import open_checkpoint
from tests.conversion.small import plan
from tests.engine.pretended_ray import PretendedRay
from tests.zoo import tiny


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def fitted(ray=None):
    """Errors and parameters of all layers of a tiny model."""
    model = tiny()
    tokens = torch.arange(1, 41).repeat(4, 2)[:, :64]
    parts = {shape.layer: build_replacement(shape, plan(model).replacement, None)[0] for shape in layer_shapes(model)}
    options, quiet = FitOptions(steps=4, check=2), lambda *a, **k: None
    with open_checkpoint(None, {}) as checkpoint:
        errors = fit_all(model, parts, tokens, options, checkpoint, quiet, ray)
    return [errors, *(p.detach() for part in parts.values() for p in part.parameters())]


def test_layers_fitted_side_by_side_are_as_if_each_was_alone(threads):
    found = []
    for count in (1, 2, 3):
        threads(count)
        found.append(fitted())
        assert torch.get_num_threads() == count
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_an_address_without_a_cluster_is_said():
    with pytest.raises(AttngapError, match="Ray address 'nonsense' is not host:port"):
        fitted(ray="nonsense")


def test_layers_fitted_as_jobs_are_the_same(threads, monkeypatch):
    threads(1)
    monkeypatch.setattr(cluster, "_connect", lambda _address: PretendedRay())
    for one, other in zip(fitted(), fitted(ray="pretended"), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.slow  # starting Ray's processes takes half a minute
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_layers_fitted_on_ray_are_the_same(threads):
    pytest.importorskip("ray", reason="ray is not installed: pip install attngap[ray]")
    threads(1)
    for one, other in zip(fitted(), fitted(ray="local"), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
