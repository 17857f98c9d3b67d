"""Features that do not see positions: fading, the state of a past, some rows of a passage, and heads left without."""

import pytest
import torch

from attngap import mechanism
from attngap.errors import AttngapError
from attngap.mechanisms.far_rows import FarRows
from attngap.mechanisms.feature_maps import Prototype
from attngap.mechanisms.fit import FitOptions, fit_layer
from attngap.ops import softmax_attention

HEADS, KV, DIM, WINDOW, SINKS = 4, 2, 8, 6, 2
SPEED = 100.0 ** -(torch.arange(DIM // 2) / (DIM // 2))


def angles(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    turned = (torch.arange(length)[:, None] * SPEED).repeat(1, 2)[None]
    return turned.cos(), turned.sin()


def hybrid(**options):
    made = mechanism(
        "hybrid", HEADS, DIM, kv_heads=KV, feature_map="prototype", window=WINDOW, sinks=SINKS, relative=False,
        gain="query", rotary={}, map_options={"features": 12, "decay": True}, **options,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in made.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=generator))
    return made


def streams(batch: int, length: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, HEADS, length, DIM, generator=generator)
    k, v = (torch.randn(batch, KV, length, DIM, generator=generator) for _ in range(2))
    return q, k, v


def test_a_fading_feature_weighs_keys_by_their_distance():
    made = Prototype(2, DIM, 1, features=5, decay=True)
    q, k = torch.randn(1, 2, 1, DIM), torch.randn(1, 1, 1, DIM)
    plain = Prototype(2, DIM, 1, features=5)
    plain.load_state_dict({name: x for name, x in made.state_dict().items() if name != "log_rate"})
    near, far = torch.tensor([[900]]), torch.tensor([[100]])
    product = made.query(q, near) * made.key(k, far)
    expected = plain.query(q, near) * plain.key(k, far) * (-800 * made.rates()).exp()
    torch.testing.assert_close(product, expected, rtol=1e-4, atol=1e-7)
    assert torch.isfinite(made.key(k, torch.tensor([[10**7]]))).all()


def test_the_state_of_a_past_is_what_reading_it_leaves():
    made = hybrid()
    for length in (1, 5, WINDOW + SINKS, 30):
        q, k, v = streams(1, length)
        _, read = made(None, q, k, v, rotary=angles(length))
        found = made.state_after(k, v, angles(length))
        assert set(found) == set(read)
        for name in read:
            torch.testing.assert_close(found[name], read[name], rtol=1e-4, atol=1e-5)


def test_some_rows_of_a_passage_are_those_of_the_whole():
    made = hybrid()
    q, k, v = streams(2, 61)
    whole, _ = made(None, q, k, v, rotary=angles(61))
    rows = FarRows(made, q, k, v, torch.zeros_like(whole), angles(61))
    for step in (1, 4):
        found, places = rows.output(slice(None), step)
        torch.testing.assert_close(found, whole[:, :, places], rtol=1e-4, atol=1e-5)
        assert places[-1] == 60 or step > 1


def test_no_head_is_worse_than_sinks_and_window_on_the_passages_that_judge():
    q, k, v = streams(4, 80)
    target = softmax_attention(q, k, v)
    target[:, 1] = mechanism(
        "hybrid", HEADS, DIM, kv_heads=KV, feature_map="none", gain="none", window=WINDOW, sinks=SINKS
    )(None, q, k, v)[0][:, 1]
    bad = FitOptions(steps=3, rate=3.0, heldout=2, settle=False)
    made = hybrid()
    error = fit_layer(made, q, k, v, target, bad, rotary=angles(80))
    alone = FarRows(made, q, k, v, target, angles(80))
    near = (alone.near.out - target)[2:].square().mean((0, 2, 3)) / alone.energy
    out, _ = made(None, q[2:], k[2:], v[2:], rotary=angles(80))
    real = (out - target[2:]).square().mean((0, 2, 3)) / alone.energy
    assert (real <= near + 1e-5).all()
    assert error[1] <= 1e-9  # it reads nothing far, and any feature would do harm
    torch.testing.assert_close(real, error, rtol=1e-3, atol=1e-6)


def test_a_hybrid_of_before_has_the_parameters_and_the_reach_it_had():
    """What converted folders hold: options without a layout of positions, and features that do not fade."""
    old = mechanism(
        "hybrid", HEADS, DIM, kv_heads=KV, feature_map="prototype", window=WINDOW, sinks=SINKS, relative=False,
        gain="query", reach=20, map_options={}, scale=0.5,
    )  # fmt: skip
    names = ("query_weight", "query_bias", "query_scale", "key_weight", "key_bias")
    assert set(old.state_dict()) == {"log_gain", "gain_weight", *(f"feature_map.{name}" for name in names)}
    q, k, v = streams(1, 40)
    near = mechanism(
        "hybrid", HEADS, DIM, kv_heads=KV, feature_map="none", gain="none", window=WINDOW, sinks=SINKS, scale=0.5
    )
    apart = (old(None, q, k, v)[0] - near(None, q, k, v)[0]).abs().amax((0, 1, 3))
    assert apart[WINDOW + SINKS : 20].min() > 0
    assert apart[20:].max() < 1e-6
    with pytest.raises(AttngapError, match="need the cos and sin of the positions: pass rotary"):
        hybrid()(None, q, k, v)
