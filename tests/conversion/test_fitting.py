"""Layers that are fitted while the model runs."""

import pytest
import torch

from attngap.conversion.fitting import fit_all
from attngap.conversion.replacement import build
from attngap.conversion.work import Work
from attngap.mechanisms.fit import FitOptions
from attngap.models.swap import layer_shapes
from tests.conversion.small import plan
from tests.models.tiny import tiny


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_layers_fitted_side_by_side_are_as_if_each_was_alone(threads):
    model = tiny()
    tokens = torch.arange(1, 41).repeat(4, 2)[:, :64]
    found = []
    for count in (1, 2, 3):
        threads(count)
        parts = {shape.layer: build(shape, plan(model).replacement, None)[0] for shape in layer_shapes(model)}
        errors = fit_all(model, parts, tokens, FitOptions(steps=4, check=2), Work(None, {}), lambda *a, **k: None)
        assert torch.get_num_threads() == count
        found.append([errors, *(p.detach() for part in parts.values() for p in part.parameters())])
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
