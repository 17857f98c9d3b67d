"""Pieces of prompts by one compiled call each, against the same mechanism in torch and token by token."""

import pytest
import torch

from attngap import mechanism
from attngap.mechanisms.prompts import read_piece
from attngap.mechanisms.rotary import every_layout
from attngap.ops import native
from attngap.ops.hybrid import compiled

pytestmark = pytest.mark.skipif(not native.available(), reason="numba is not installed")

B, H, KV, D, DV = 2, 6, 2, 12, 10


@pytest.fixture(autouse=True)
def canaries(monkeypatch):
    monkeypatch.setenv("ATTNGAP_DEBUG_KERNELS", "1")


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def made(dtype=torch.float64, layout=None, dim=D, **options):
    options = {"feature_map": "prototype", "map_options": {"features": 19, "decay": True}, "window": 21} | options
    options = {"sinks": 3, "relative": False, "gain": "query", "kv_heads": KV, "rotary": layout} | options
    torch.manual_seed(0)
    found = mechanism("hybrid", H, dim, DV, **options)
    for x in found.parameters():
        x.add_(0.5 * torch.randn_like(x))
    for name, x in found.named_parameters():
        if name.endswith("log_rate"):
            x.uniform_(-8, -1)  # some slow, some beyond the fastest
    return found.to(dtype)


def streams(t, dtype=torch.float64, dim=D, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(B, h, t, w, generator=generator, dtype=dtype) for h, w in ((H, dim), (KV, dim), (KV, DV)))


def angles(t, width, dtype=torch.float64):
    turned = torch.rand(B, t, width, generator=torch.Generator().manual_seed(9), dtype=dtype) * 6
    return 1.3 * turned.cos(), 1.3 * turned.sin()  # scaled, as some models have them


def in_torch(found, tokens, mask=None, rotary=None):
    with native.off():
        return found(None, *tokens, mask=mask, rotary=rotary)


def in_pieces(found, tokens, sizes, mask=None, rotary=None, skipped=None):
    """Piece after piece from the state that the one before left."""
    state, at, outs = None, 0, []
    start = torch.zeros(B, dtype=torch.long)
    for size in sizes:
        cut = slice(at, at + size)
        part = [x[:, :, cut] for x in tokens]
        real = None if mask is None else mask[:, cut]
        turned = None if rotary is None else (rotary[0][:, cut], rotary[1][:, cut])
        result = read_piece(found, *part, state=state, start=start, mask=real, rotary=turned, skipped=skipped)
        assert result is not None
        out, state = result
        start = start + (size if real is None else real.sum(1))
        outs.append(out)
        at += size
    assert state is not None
    return torch.cat(outs, 2), state


def same(got, want, tolerance=1e-9):
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def same_state(got, want, tolerance=1e-9):
    assert got.keys() == want.keys()
    for name, x in want.items():
        same(got[name], x, tolerance)


@pytest.mark.parametrize("sizes", [(100,), (2, 30, 68), (40, 2, 2, 56)])
def test_pieces_are_the_whole_in_torch(sizes):
    found, tokens = made(), streams(100)
    want, after = in_torch(found, tokens)
    got, state = in_pieces(found, tokens, sizes)
    same(got, want)
    same_state(state, after)


@pytest.mark.parametrize("layout", every_layout(), ids=str)
def test_every_layout_of_positions_is_turned_back(layout):
    options = {"pairs": layout.pairs, "angles": layout.angles, "place": layout.place}
    found, tokens = made(layout=options), streams(60)
    rotary = angles(60, 4 if layout.angles == "once" else 8)
    want, after = in_torch(found, tokens, rotary=rotary)
    got, state = in_pieces(found, tokens, (33, 27), rotary=rotary)
    same(got, want)
    same_state(state, after)


def test_whole_vectors_of_channels_are_turned_back_alike():
    layout = {"pairs": "halves", "angles": "halves", "place": "first"}
    found, tokens = made(torch.float32, layout, dim=32), streams(90, torch.float32, dim=32)
    rotary = angles(90, 32, torch.float32)
    want, after = in_torch(found, tokens, rotary=rotary)
    got, state = in_pieces(found, tokens, (90,), rotary=rotary)
    same(got, want, 2e-5)
    same_state(state, after, 2e-4)


@pytest.mark.parametrize(
    "options",
    [
        {"relative": True},
        {"gain": "none"},
        {"gain": "head"},
        {"reach": 50},
        {"sinks": 0},
        {"window": 16},
        {"map_options": {"features": 32}},
    ],
    ids=str,
)
def test_every_option_is_the_same_in_torch(options):
    found, tokens = made(**options), streams(80)
    want, after = in_torch(found, tokens)
    got, state = in_pieces(found, tokens, (50, 30))
    same(got, want)
    same_state(state, after)


def test_padding_is_left_out():
    found, tokens = made(), streams(70)
    mask = torch.ones(B, 70, dtype=torch.bool)
    mask[0, :9], mask[1, 20:31], mask[1, 69] = False, False, False
    want, after = in_torch(found, tokens, mask=mask)
    got, state = in_pieces(found, tokens, (40, 30), mask=mask)
    same(got, want)
    same_state(state, after)


def test_skipped_heads_are_left_out_and_the_others_are_what_they_were():
    found, tokens = made(), streams(80)
    skipped = torch.tensor([0, 1, 0, 1, 1, 1])
    want, after = in_torch(found, tokens)
    got, state = in_pieces(found, tokens, (50, 30), skipped=skipped)
    same(got[:, skipped == 0], want[:, skipped == 0])
    for name, x in state.items():
        if name != "count":
            same(x[:, 0], after[name][:, 0])
            assert not x[:, 1].any()  # of a key head that nobody reads nothing is kept


def test_parts_of_a_lane_are_the_whole(monkeypatch):
    found, tokens = made(), streams(300)
    want, after = in_pieces(found, tokens, (300,))
    monkeypatch.setattr(compiled, "_parts", lambda *_: 3)
    got, state = in_pieces(found, tokens, (100, 200))
    whole, _ = in_pieces(found, tokens, (300,))
    assert torch.equal(whole, want)
    same(got, want)
    same_state(state, after)


def test_a_state_of_pieces_goes_on_token_by_token():
    found, tokens = made(), streams(60)
    _, state = in_pieces(found, [x[:, :, :50] for x in tokens], (50,))
    want, _ = in_torch(found, tokens)
    for i in range(50, 60):
        read = found.read(None, *(x[:, :, i : i + 1] for x in tokens), start=i)
        out, state = found.step(state, read)
        same(out, want[:, :, i : i + 1])


def test_what_has_no_compiled_form_is_left_to_others():
    tokens = streams(20)
    assert read_piece(made(feature_map="hedgehog", map_options={}), *tokens) is None
    assert read_piece(made(), *(x[:, :, :1] for x in tokens)) is None
    assert read_piece(made(layout={"pairs": "halves", "angles": "halves", "place": "first"}), *tokens) is None
    found = made()
    with torch.enable_grad():
        assert read_piece(found, *tokens) is None
    with native.off():
        assert read_piece(made(), *tokens) is None


@pytest.mark.parametrize(("lanes", "threads", "length", "parts"), [(3, 2, 1024, 2), (3, 2, 300, 1), (4, 2, 1024, 1)])
def test_lanes_are_cut_where_a_thread_would_wait(lanes, threads, length, parts):
    setting = compiled.PieceSetting(256, 4, 1.0, False, True)
    assert compiled._parts(lanes, threads, length, setting) == parts
