"""States as caches hold them, without features of the window: the same outputs as with them, in fewer floats."""

import pytest
import torch
from torch.nn import functional as F

from attngap import mechanism
from attngap.mechanisms.decoding import decoder
from attngap.mechanisms.held import held_floats, hold, release, token_step
from attngap.mechanisms.rotary import every_layout
from attngap.ops import native

B, H, KV, D, DV, WINDOW = 3, 6, 2, 12, 10, 5
NONE = torch.full((H,), -1)
LLAMA = {"pairs": "halves", "angles": "halves", "place": "first"}


@pytest.fixture(autouse=True)
def canaries(monkeypatch):
    monkeypatch.setenv("ATTNGAP_DEBUG_KERNELS", "1")


def made(layout=None, **options):
    options = {"feature_map": "prototype", "map_options": {"features": 19, "decay": True}, "window": WINDOW} | options
    options = {"sinks": 2, "relative": False, "gain": "query", "kv_heads": KV, "rotary": layout} | options
    torch.manual_seed(0)
    found = mechanism("hybrid", H, D, DV, **options)
    with torch.no_grad():
        for name, x in found.named_parameters():
            x.uniform_(-8, -1) if name.endswith("log_rate") else x.add_(0.5 * torch.randn_like(x))
    return found.double()


def streams(t):
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(B, h, t, w, generator=generator).double() for h, w in ((H, D), (KV, D), (KV, DV)))


def angles(t, width, batch=B):
    turned = torch.rand(batch, t, width, generator=torch.Generator().manual_seed(9)).double() * 6
    return 1.3 * turned.cos(), 1.3 * turned.sin()  # scaled, as some models have them


def cut(x, start, stop):
    return tuple(y[:, :, start:stop] for y in x)


def turn(rotary, start, stop):
    return None if rotary is None else tuple(x[:, start:stop] for x in rotary)


def by_definition(found, state, part, start, real, rotary):
    return found.step(state, found.read(None, *part, start=start, mask=real, rotary=rotary))


def empty(found, x, rotary):
    state = found.init_state(found.read(None, *cut(x, 0, 1), rotary=turn(rotary, 0, 1)))
    before = hold(found, state, turn(rotary, 0, 1), real=torch.zeros(B, 1, dtype=torch.bool))
    return state, {name: y.contiguous() for name, y in before.items()}


@torch.no_grad()
@pytest.mark.skipif(not native.available(), reason="numba is not installed")
@pytest.mark.parametrize("layout", [None, *every_layout()], ids=str)
@pytest.mark.parametrize("options", [{}, {"sinks": 0, "window": 1}], ids=str)
def test_a_compiled_token_equals_the_definition(layout, options):
    names = None if layout is None else {name: getattr(layout, name) for name in LLAMA}
    found, x, t = made(names, **options), streams(20), 20
    rotary = None if layout is None else angles(t, 4 if layout.angles == "once" else 8)
    expected_state, held = empty(found, x, rotary)
    position = torch.zeros(B, dtype=torch.long)
    call = decoder(found, held, NONE, position, turn(rotary, 0, 1))
    assert call is not None
    assert "fk" not in held
    for i in range(t):
        given = cut(x, i, i + 1), i, None, turn(rotary, i, i + 1)
        expected, expected_state = by_definition(found, expected_state, *given)
        torch.testing.assert_close(call.token(*given[0], given[3], None, None).transpose(1, 2), expected)


@torch.no_grad()
@pytest.mark.skipif(not native.available(), reason="numba is not installed")
@pytest.mark.parametrize("head", range(KV))
@pytest.mark.parametrize("kept", [True, False], ids=["kept heads by the call", "kept heads elsewhere"])
def test_key_heads_that_only_kept_heads_read_need_no_state(head, kept):
    found, x, t, group = made(LLAMA), streams(20), 20, H // KV
    rotary, heads = angles(t, 8), torch.tensor([head])
    replaced = torch.arange(H) // group == head
    place = torch.where(replaced | torch.tensor(not kept), -1, 0)
    expected_state, held = empty(found, x, rotary)
    held |= {name: held[name][:, heads].contiguous() for name in ("k", "v", "S", "z")}
    position = torch.zeros(B, dtype=torch.long)
    call = decoder(found, held, place, position, turn(rotary, 0, 1), heads)
    other = 1 - head
    keys, values = (x[i].new_empty(B, 1, t, x[i].shape[3]) for i in (1, 2))
    for i in range(t):
        given = cut(x, i, i + 1), i, None, turn(rotary, i, i + 1)
        expected, expected_state = by_definition(found, expected_state, *given)
        out = call.token(*given[0], given[3], None, (keys, values, i + 1) if kept else None).transpose(1, 2)
        torch.testing.assert_close(out[:, replaced], expected[:, replaced])
        if kept:
            past = (y[:, other : other + 1, : i + 1].expand(-1, group, -1, -1) for y in x[1:])
            exact = F.scaled_dot_product_attention(given[0][0][:, ~replaced], *past)
            torch.testing.assert_close(out[:, ~replaced], exact)
    torch.testing.assert_close(held["S"][:, 0], expected_state["S"][:, head])


@torch.no_grad()
@pytest.mark.skipif(not native.available(), reason="numba is not installed")
@pytest.mark.parametrize("threads", [1, 2])
def test_compiled_tokens_of_padded_sequences_are_what_they_are_alone(threads, monkeypatch):
    if threads > 1:
        monkeypatch.setattr(native, "ALONE", 0)
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    found, x, t = made(LLAMA), streams(26), 26
    rotary, real = angles(t, 8), torch.rand(B, t, generator=torch.Generator().manual_seed(1)) < 0.7
    held, position = empty(found, x, rotary)[1], torch.zeros(B, dtype=torch.long)
    call = decoder(found, held, NONE, position, turn(rotary, 0, 1))
    parts = [
        call.token(*cut(x, i, i + 1), turn(rotary, i, i + 1), real[:, None, None, : i + 1], None) for i in range(t)
    ]
    out = torch.cat(parts, 1).transpose(1, 2)
    for b in range(B):
        alone, here = tuple(y[b : b + 1, :, real[b]] for y in x), tuple(y[b : b + 1, real[b]] for y in rotary)
        torch.testing.assert_close(out[b : b + 1, :, real[b]], found(None, *alone, rotary=here)[0])


@torch.no_grad()
@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("feature_map", ["prototype", "hedgehog", "none"])
@pytest.mark.parametrize("heads", [None, [1]], ids=["all", "one key head"])
@pytest.mark.parametrize("batch", [1, B], ids=["angles for all", "angles for each"])
def test_pieces_and_tokens_equal_one_pass_whatever_the_padding(feature_map, batch, heads, kernels):
    options = {} if feature_map == "prototype" else {"map_options": None, "gain": "none"}
    found, x, t = made(LLAMA, feature_map=feature_map, **options), streams(31), 31
    rotary = tuple(y.expand(B, -1, -1) for y in angles(t, 8, batch))
    real = torch.rand(B, t, generator=torch.Generator().manual_seed(1)) < torch.tensor([1.0, 0.8, 0.5])[:, None]
    expected = found(None, *x, mask=real, rotary=rotary)[0]
    held, count, parts = None, torch.zeros(B, dtype=torch.long), []
    heads = None if heads is None else torch.tensor(heads)
    with native.off() if not kernels else torch.no_grad():
        for start, stop in ((0, 3), (3, 4), (4, 5), (5, 17), (17, 18), (18, 19), (19, 31)):
            piece, mask, here = cut(x, start, stop), real[:, start:stop], turn(rotary, start, stop)
            read = found.read(None, *piece, start=count, mask=mask, rotary=here)
            if stop - start == 1:
                parts.append(token_step(found, read, held, here, None, heads))
            else:
                state = None if held is None else release(found, held, heads)
                out, state = found.chunked(read, state)
                parts.append(out)
                held = hold(found, state, here, before=held, real=mask, heads=heads)
            count = count + mask.sum(1)
            assert "fk" not in held
            assert held["k"].shape[1] == (KV if heads is None else 1)
    some = slice(None) if heads is None else slice(H // KV, None)
    torch.testing.assert_close(torch.cat(parts, 2)[:, some], expected[:, some])


@torch.no_grad()
def test_what_is_released_are_the_features_that_were_there():
    found, x, rotary = made(LLAMA), streams(23), angles(23, 8)
    state = found(None, *x, rotary=rotary)[1]
    torch.testing.assert_close(release(found, hold(found, state, rotary))["fk"], state["fk"])
    other = hold(found, state, tuple(2 * y for y in rotary))
    assert not torch.allclose(release(found, other)["fk"], state["fk"])  # other angles would not do


@torch.no_grad()
@pytest.mark.parametrize("layout", [None, LLAMA], ids=["not turned", "turned"])
def test_the_floats_are_counted(layout):
    found, x = made(layout), streams(9)
    rotary = None if layout is None else angles(9, 8)
    held = hold(found, found(None, *x, rotary=rotary)[1], rotary)
    floats = sum(y.numel() for name, y in held.items() if name != "count") // B
    assert floats == held_floats(found, 9, 0 if layout is None else 4)


def test_other_mechanisms_have_nothing_to_leave_out():
    found = mechanism("elu", H, D, DV, kv_heads=KV)
    state = found(None, *(x.float() for x in streams(4)))[1]
    assert hold(found, state, None) is state
    assert release(found, state) is state
    assert held_floats(found, 4, 6) == KV * found.state_floats(4)
