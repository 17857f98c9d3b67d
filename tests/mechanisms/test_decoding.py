"""Token after token by one compiled call each, against the definition, SDPA and the rotary layouts of models."""

import copy

import pytest
import torch
from torch.nn import functional as F

from attngap import mechanism
from attngap.errors import AttngapError
from attngap.mechanisms import calls
from attngap.mechanisms.decoding import decoder
from attngap.mechanisms.rotary import every_layout
from attngap.ops import native

pytestmark = pytest.mark.skipif(not native.available(), reason="numba is not installed")

B, H, KV, D, DV = 3, 6, 2, 12, 10
PLACE = torch.tensor([-1, 0, -1, 1, 1, 1])  # heads 1, 3, 4 and 5 are kept: some of one group, all of the other
NONE = torch.full((H,), -1)


@pytest.fixture(autouse=True)
def canaries(monkeypatch):
    monkeypatch.setenv("ATTNGAP_DEBUG_KERNELS", "1")


def made(dtype=torch.float64, layout=None, **options):
    options = {"feature_map": "prototype", "map_options": {"features": 19, "decay": True}, "window": 5} | options
    options = {"sinks": 2, "relative": False, "gain": "query", "kv_heads": KV, "rotary": layout} | options
    torch.manual_seed(0)
    found = mechanism("hybrid", H, D, DV, **options)
    with torch.no_grad():
        for x in found.parameters():
            x.add_(0.5 * torch.randn_like(x))
        for name, x in found.named_parameters():
            if name.endswith("log_rate"):
                x.uniform_(-8, -1)  # some slow, some beyond the fastest
    return found.to(dtype)


def streams(t, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(B, h, t, w, generator=generator, dtype=dtype) for h, w in ((H, D), (KV, D), (KV, DV)))


def angles(t, width, dtype=torch.float64):
    turned = torch.rand(B, t, width, generator=torch.Generator().manual_seed(9), dtype=dtype) * 6
    return 1.3 * turned.cos(), 1.3 * turned.sin()  # scaled, as some models have them


def by_definition(found, state, part, real=None, start=0, rotary=None):
    read = found.read(None, *part, start=start, mask=real, rotary=rotary)
    return found.step(state, read)


def exact(q, k, v, mask=None):
    k, v = (x.repeat_interleave(H // KV, 1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def cut(x, i):
    return tuple(y[:, :, i : i + 1] for y in x)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"relative": True, "gain": "head"},
        {"gain": "none", "map_options": {"features": 16}, "sinks": 0},
        {"reach": 13, "window": 1},
        {"feature_map": "none", "map_options": None, "gain": "none"},
        {"window": 300, "map_options": {"features": 32, "decay": True}},
    ],
    ids=str,
)
def test_every_token_equals_the_definition_and_kept_heads_sdpa(options, dtype):
    found, x, t = made(dtype, **options), streams(30, dtype=dtype), 30
    state = found.init_state(found.read(None, *cut(x, 0)))
    expected_state, position = copy.deepcopy(state), torch.zeros(B, dtype=torch.long)
    keys, values = x[1].new_empty(B, KV, t + 3, D), x[1].new_empty(B, KV, t + 3, DV)
    call = decoder(found, state, PLACE, position, None)
    assert call is not None
    tolerance = {"rtol": 1e-9, "atol": 1e-9} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-5}
    for i in range(t):
        assert call.fits(found, state, position)
        out = call.token(*cut(x, i), None, None, (keys, values, i + 1)).transpose(1, 2)
        expected, expected_state = by_definition(found, expected_state, cut(x, i), start=i)
        softmax = exact(x[0][:, :, i : i + 1], x[1][:, :, : i + 1], x[2][:, :, : i + 1])
        torch.testing.assert_close(out, torch.where((PLACE >= 0)[:, None, None], softmax, expected), **tolerance)
    torch.testing.assert_close(state.pop("count"), expected_state.pop("count"))
    for name, y in expected_state.items():
        torch.testing.assert_close(state[name][:, 0], y[:, 0], **tolerance)
        assert not state[name][:, 1].any()  # all heads that would read it are kept
    assert position.tolist() == [t] * B
    torch.testing.assert_close(keys[:, :, :t], x[1])
    torch.testing.assert_close(values[:, :, :t], x[2])


@torch.no_grad()
@pytest.mark.parametrize("layout", every_layout(), ids=lambda x: f"{x.pairs}-{x.angles}-{x.place}")
def test_features_read_what_every_rotary_layout_turns_back(layout):
    options = {name: getattr(layout, name) for name in ("pairs", "angles", "place")}
    found, x = made(layout=options), streams(20)
    cos, sin = angles(20, 4 if layout.angles == "once" else 8)
    state = found.init_state(found.read(None, *cut(x, 0), rotary=(cos[:, :1], sin[:, :1])))
    expected_state, position = copy.deepcopy(state), torch.zeros(B, dtype=torch.long)
    call = decoder(found, state, NONE, position, (cos[:, :1], sin[:, :1]))
    assert call is not None
    for i in range(20):
        turn = cos[:, i : i + 1], sin[:, i : i + 1]
        expected, expected_state = by_definition(found, expected_state, cut(x, i), start=i, rotary=turn)
        torch.testing.assert_close(call.token(*cut(x, i), turn, None, None).transpose(1, 2), expected)


@torch.no_grad()
@pytest.mark.parametrize("threads", [1, 2])
def test_padded_sequences_of_different_length_are_what_they_are_alone(threads, monkeypatch):
    if threads > 1:
        monkeypatch.setattr(native, "ALONE", 0)
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    found, x, t = made(), streams(26), 26
    real = torch.rand(B, t, generator=torch.Generator().manual_seed(1)) < torch.tensor([1.0, 0.7, 0.4])[:, None]
    state = found.init_state(found.read(None, *cut(x, 0)))
    position = torch.zeros(B, dtype=torch.long)
    keys, values = x[1].new_zeros(B, KV, t, D), x[1].new_zeros(B, KV, t, DV)
    call = decoder(found, state, PLACE, position, None)
    assert call is not None
    rows = []
    for i in range(t):
        mask = real[:, None, None, : i + 1]
        rows.append(call.token(*cut(x, i), None, mask, (keys, values, i + 1)).transpose(1, 2))
    out = torch.cat(rows, 2)
    assert position.tolist() == real.sum(1).tolist() == state["count"].tolist()
    for b in range(B):
        alone = tuple(y[b : b + 1, :, real[b]] for y in x)
        expected = found(None, *alone)[0]
        causal = torch.ones(alone[0].shape[2], alone[0].shape[2], dtype=torch.bool).tril()
        expected = torch.where((PLACE >= 0)[:, None, None], exact(*alone, mask=causal), expected)
        torch.testing.assert_close(out[b : b + 1, :, real[b]], expected)
        assert not out[b, :, ~real[b]].any()


@torch.no_grad()
def test_a_call_no_longer_fits_when_what_it_was_laid_out_for_has_changed():
    found, x = made(), streams(2)
    state, position = found(None, *cut(x, 0))[1], torch.ones(B, dtype=torch.long)

    def fits(change):
        mine, held = copy.deepcopy(found), copy.deepcopy(state)
        call = decoder(mine, held, NONE, position, None)
        assert call is not None
        assert call.fits(mine, held, position)
        return call.fits(mine, *(change(mine, held) or (held, position)))

    def replace(mine, held):
        mine.feature_map.key_weight.data = mine.feature_map.key_weight.data.clone()

    def new_parameter(mine, held):
        mine.log_gain = torch.nn.Parameter(mine.log_gain.detach().clone())

    assert not fits(replace)
    assert not fits(new_parameter)
    assert not fits(lambda mine, held: setattr(mine, "window", 6))
    assert not fits(lambda mine, held: setattr(mine, "scale", 0.1))
    assert not fits(lambda mine, held: held.update(k=held["k"].clone()))
    assert not fits(lambda mine, held: (dict(held), position))
    assert not fits(lambda mine, held: (held, position + 0))
    assert fits(lambda mine, held: None)


@torch.no_grad()
def test_parameters_that_change_in_place_are_read_anew():
    found, x = made(), streams(12)
    outputs = []
    for changed in (False, True):
        state, position = found(None, *(y[:, :, :10] for y in x))[1], torch.full((B,), 10)
        call = decoder(found, state, NONE, position, None)
        assert call is not None
        call.token(*cut(x, 10), None, None, None)
        if changed:
            found.feature_map.query_weight.data.mul_(1.5)
        outputs.append(call.token(*cut(x, 11), None, None, None))
    assert (outputs[0] - outputs[1]).abs().max() > 1e-3


@torch.no_grad()
def test_a_query_that_shares_memory_with_the_state_is_read_first():
    found, x = made(feature_map="none", map_options=None, gain="none"), streams(9)
    outputs = []
    for shared in (False, True):
        state, position = found(None, *(y[:, :, :8] for y in x))[1], torch.full((B,), 8)
        call = decoder(found, state, NONE, position, None)
        assert call is not None
        key = state["k"][:, :, 3:4]  # the slot that the token takes
        outputs.append(call.token(x[0][:, :, 8:], key if shared else key.clone(), x[2][:, :, 8:], None, None, None))
        assert position.tolist() == [9] * B
    torch.testing.assert_close(*outputs)


@torch.no_grad()
def test_what_does_not_fit_is_refused_before_an_address_is_used():
    found, x = made(), streams(9)
    state, position = found(None, *(y[:, :, :8] for y in x))[1], torch.full((B,), 8)
    call = decoder(found, state, PLACE, position, None)
    assert call is not None
    q, k, v = cut(x, 8)
    keys, values = x[1].new_zeros(B, KV, 9, D), x[1].new_zeros(B, KV, 9, DV)
    with pytest.raises(AttngapError, match=r"q must be \(3, 6, 1, 12\) for these heads, got \(3, 5, 1, 12\)"):
        call.token(q[:, :5], k, v, None, None, (keys, values, 9))
    with pytest.raises(
        AttngapError, match=r"v must be torch\.float64 for a state of torch\.float64, got torch\.float32"
    ):
        call.token(q, k, v.float(), None, None, (keys, values, 9))
    with pytest.raises(AttngapError, match="10 tokens of kept heads do not fit 9 keys, 9 values"):
        call.token(q, k, v, None, None, (keys, values, 10))
    with pytest.raises(AttngapError, match="place must be below the 1 groups of keys"):
        call.token(q, k, v, None, None, (keys[:, :1], values[:, :1], 9))
    with pytest.raises(AttngapError, match="the mask is for 8 keys, and kept heads read 9"):
        call.token(q, k, v, None, torch.ones(B, 1, 1, 8, dtype=torch.bool), (keys, values, 9))
    assert position.tolist() == [8] * B
    call.token(q, k, v, None, None, (keys, values, 9))
    with pytest.raises(AttngapError, match="q is on the meta device"):
        call.token(q.to("meta"), k, v, None, None, (keys, values, 9))
    zeros = torch._efficientzerotensor(q.shape, dtype=q.dtype)  # has no memory
    torch.testing.assert_close(
        call.token(zeros, k, v, None, None, (keys, values, 9))[:, 0, 1], values[:, 0].mean(1), rtol=1e-6, atol=1e-6
    )
    with pytest.raises(AttngapError, match="v holds NaN"):
        call.token(q, k, v * torch.nan, None, None, (keys, values, 9))


@torch.no_grad()
def test_features_without_a_compiled_form_and_other_memory_are_left_to_torch():
    x = streams(1)
    for options in ({"feature_map": "hedgehog", "map_options": None}, {}):
        found = made(**options)
        state, position = found(None, *x)[1], torch.ones(B, dtype=torch.long)
        if not options:
            state["k"] = state["k"].transpose(2, 3).contiguous().transpose(2, 3)
        assert decoder(found, state, NONE, position, None) is None


def test_no_compiled_call_under_gradients_transforms_or_where_kernels_are_off():
    assert not calls.possible()
    with torch.no_grad():
        assert calls.possible()
        with native.off():
            assert not calls.possible()
        seen = []
        torch.vmap(lambda x: seen.append(calls.possible()) or x)(torch.ones(2))
        assert seen == [False]
