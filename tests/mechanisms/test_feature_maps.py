import math

import pytest
import torch
from torch.nn import functional as F

from attngap.errors import AttngapError
from attngap.mechanisms.feature_maps import FEATURE_MAPS, feature_map, orthogonal_gaussian

PLACE = torch.arange(7)[None]


def inputs(heads=2, dim=6, seed=0, size=1.0):
    generator = torch.Generator().manual_seed(seed)
    draw = (torch.randn(1, heads, 7, dim, generator=generator, dtype=torch.float64) * size for _ in range(2))
    return tuple(draw)


@pytest.mark.parametrize("degree", [1, 2, 3, 4])
def test_polynomial_is_the_power_of_the_score(degree):
    q, k = inputs()
    phi = feature_map("polynomial", 2, 6, 2, degree=degree).double()
    assert phi.width == math.comb(6 + degree - 1, degree)
    torch.testing.assert_close(phi.query(q, PLACE) @ phi.key(k, PLACE).mT, (q @ k.mT / 6**0.5) ** degree)


def test_taylor_is_the_series():
    q, k = inputs()
    phi = feature_map("taylor", 2, 6, 2).double()
    score = q @ k.mT / 6**0.5
    torch.testing.assert_close(phi.query(q, PLACE) @ phi.key(k, PLACE).mT, 1 + score + score**2 / 2)


def within_standard_error(estimates, expected):
    """Is the mean over independent draws (axis 0) within four of its standard errors of the expected value?"""
    error = estimates.std(0) / estimates.shape[0] ** 0.5
    return ((estimates.mean(0) - expected).abs() < 4 * error).all()


def favor_kernels(draws, q, k, bias=0.0):
    """Unstabilized estimates of exp(q . k / sqrt(d)): the stabilizing factors multiplied back in."""
    phi = feature_map("favor", draws, q.shape[-1], draws, features=12).double()  # every head draws anew
    q, k = q.expand(1, draws, -1, -1), k.expand(1, draws, -1, -1)
    factor = (phi.query_shift(phi.exponent(q)) + phi.key_shift()).exp()
    return ((phi.query(q, PLACE) + bias) @ phi.key(k, PLACE).mT * factor)[0]


def test_favor_is_unbiased():
    q, k = inputs(heads=1, size=0.5)
    assert within_standard_error(favor_kernels(1500, q, k), (q @ k.mT / 6**0.5).exp()[0, 0])


def test_favor_check_sees_a_bias():
    """Adding a constant to features, as some releases do for stability, is caught by the same check."""
    q, k = inputs(heads=1, size=0.5)
    assert not within_standard_error(favor_kernels(1500, q, k, bias=0.05), (q @ k.mT / 6**0.5).exp()[0, 0])


def test_rff_is_unbiased():
    q, k = inputs(heads=1, size=0.5)
    expected = (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT - 1).exp()
    phi = feature_map("rff", 1500, 6, 1500, features=12).double()
    q, k = q.expand(1, 1500, -1, -1), k.expand(1, 1500, -1, -1)
    assert within_standard_error((phi.query(q, PLACE) @ phi.key(k, PLACE).mT)[0], expected[0, 0])


def test_orthogonal_rows():
    rows = orthogonal_gaussian(10, 6, torch.Generator().manual_seed(0)).double()
    for block in (rows[:6], rows[6:]):
        gram = block @ block.T
        assert (gram - gram.diag().diag()).abs().max() < 1e-5


def test_orthogonal_rows_have_gaussian_lengths():
    squares = torch.cat(
        [orthogonal_gaussian(8, 8, torch.Generator().manual_seed(s)).square().sum(-1) for s in range(500)]
    )
    error = squares.std() / squares.numel() ** 0.5
    assert (squares.mean() - 8).abs() < 4 * error  # chi-square of 8 has mean 8, variance 16
    assert (squares.var() - 16).abs() < 2


@pytest.mark.parametrize("dim", [64, 256])
@pytest.mark.parametrize("size", [1e-3, 1.0, 30.0])
def test_favor_stays_finite_in_single_precision(dim, size):
    q, k = (x.float() for x in inputs(heads=1, dim=dim, size=size))
    phi = feature_map("favor", 1, dim, 1)
    for features in (phi.query(q, PLACE), phi.key(k, PLACE)):
        assert features.isfinite().all()
        assert (features >= 0).all()


@pytest.mark.parametrize("cls", FEATURE_MAPS, ids=lambda cls: cls.name)
def test_positive_maps_are_positive_and_the_others_are_not(cls):
    q, k = inputs()
    phi = cls(2, 6, 2).double()
    features = torch.cat([phi.query(q, PLACE), phi.key(k, PLACE)])
    assert features.shape[-1] == phi.width
    assert bool((features >= 0).all()) is cls.positive
    assert cls.learned is any(True for _ in phi.parameters())


def test_hedgehog_has_its_own_matrix_for_each_head_and_side():
    q, k = inputs(heads=4)
    phi = feature_map("hedgehog", 4, 6, 2).double()
    with torch.no_grad():
        phi.query_weight.normal_()
        phi.key_weight.normal_()
    for head in range(4):
        x = q[:, head] @ phi.query_weight[head]
        expected = torch.cat([x.softmax(-1), (-x).softmax(-1)], -1)
        torch.testing.assert_close(phi.query(q, PLACE)[:, head], expected)
    x = k[:, 1] @ phi.key_weight[1]
    torch.testing.assert_close(phi.key(k[:, :2], PLACE)[:, 1, :, :6], x.softmax(-1))


@pytest.mark.parametrize("name", ["favor", "rff"])
def test_random_directions_are_shared_within_a_group(name):
    q, _ = inputs(heads=4)
    phi = feature_map(name, 4, 6, 2).double()
    same = q[:, :1].expand(1, 4, 7, 6)
    found = phi.query(same, PLACE)
    torch.testing.assert_close(found[:, 0], found[:, 1])
    assert not torch.allclose(found[:, 1], found[:, 2])


def test_seeds_differ_and_repeat():
    first, again, other = (feature_map("favor", 1, 6, 1, seed=s).projection for s in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("hedgehgo", {}, "No feature map 'hedgehgo'. Did you mean 'hedgehog'? Allowed: none, identity, elu,"),
        ("favor", {"feature": 3}, "No favor map option 'feature'. Did you mean 'features'? Allowed: features, seed"),
        ("elu", {"alpha": 1}, "No elu map option 'alpha'. elu map takes no options"),
        ("polynomial", {"degree": 0}, "polynomial: degree must be a whole number of at least 1, got 0"),
        ("polynomial", {"degree": 9}, "polynomial: degree 9 at dim 64 needs "),
        ("favor", {"features": 0}, "favor: features must be a whole number of at least 1, got 0"),
        ("rff", {"sigma": -1.0}, "rff: sigma must be positive, got -1.0"),
        ("hedgehog", {"features": -2}, "hedgehog: features must be a whole number of at least 1, got -2"),
        ("cosformer", {"length": 0}, "cosformer: length must be a whole number of at least 1, got 0"),
    ],
)
def test_refuses(name, options, message):
    with pytest.raises(AttngapError) as caught:
        feature_map(name, 2, 64, 2, **options)
    assert message in str(caught.value)


def test_cosformer_refuses_positions_past_its_length():
    phi = feature_map("cosformer", 1, 6, 1, length=6)
    with pytest.raises(AttngapError, match="cosformer: position 6 is past length=6; raise the option `length`"):
        phi.query(torch.ones(1, 1, 7, 6), PLACE)
