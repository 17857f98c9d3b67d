"""`mix` by scores, where a row has fewer of them than of features."""

import pytest
import torch

from attngap import mechanism
from attngap.errors import AttngapError
from attngap.mechanisms.feature_maps import FEATURE_MAPS, feature_map

OF_SCORES = [cls.name for cls in FEATURE_MAPS if cls.of_scores]


def inputs(length: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, h, length, 5, generator=generator, dtype=torch.float64).to(dtype) for h in (4, 2, 2)]


def test_there_are_such_maps():
    assert OF_SCORES == ["polynomial", "taylor"]


@pytest.mark.parametrize("name", OF_SCORES)
def test_the_kernel_is_the_product_of_the_features(name):
    q, k, _ = inputs(7)
    phi, position = feature_map(name, 4, 5, 4).double(), torch.arange(7)[None]
    k = k.repeat_interleave(2, 1)
    expected = phi.query(q, position) @ phi.key(k, position).mT
    torch.testing.assert_close(phi.kernel(q @ k.mT * 5**-0.5), expected)


@pytest.mark.parametrize("name", OF_SCORES)
def test_short_sequences_need_no_features(name, monkeypatch):
    m = mechanism(name, 4, 5, kv_heads=2)
    used = []
    monkeypatch.setattr(
        m.feature_map, "features", lambda x, position: used.append(1) or x.new_ones(*x.shape[:3], m.width)
    )
    m.mix(None, *inputs(m.width))
    assert not used
    m.mix(None, *inputs(m.width + 1))
    assert used


@pytest.mark.parametrize("name", OF_SCORES)
@pytest.mark.parametrize("causal", [True, False])
def test_both_ways_agree(name, causal):
    m = mechanism(name, 4, 5, kv_heads=2, causal=causal)
    low = inputs(m.width, torch.bfloat16)
    expected = m.double().parallel(m.read(None, *(x.double() for x in low)))
    torch.testing.assert_close(m.mix(None, *(x.double() for x in low)), expected)
    half = m.mix(None, *low)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.double(), expected, atol=0.02, rtol=0.02)


def test_bad_input_is_refused_as_in_forward():
    m = mechanism("taylor", 4, 5, kv_heads=2)
    q, k, v = inputs(3)
    with pytest.raises(AttngapError, match="k must have shape"):
        m.mix(None, q, q, v)
    with pytest.raises(AttngapError, match="k holds NaN; every input must be finite"):
        m.mix(None, q, k * torch.nan, v)
