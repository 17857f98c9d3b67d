"""Tokens held from anywhere: against a reference in plain loops, form against form, and what is chosen to be held."""

import contextlib
import math

import pytest
import torch

from attngap import mechanism
from attngap.errors import AttngapError
from attngap.mechanisms import turns
from attngap.mechanisms.contracts import run_steps
from attngap.mechanisms.held import held_floats
from attngap.mechanisms.prompts import read_in_turns, read_piece
from attngap.ops import native

B, H, KV, D, DV = 2, 6, 2, 12, 10
LLAMA = {"pairs": "halves", "angles": "halves", "place": "first"}
COMPILED = pytest.mark.skipif(not native.available(), reason="numba is not installed")
FORMS = [
    {"window": 5, "sinks": 1, "held": 3, "turn": 2},
    {"window": 9, "sinks": 0, "held": 2, "turn": 8},  # a turn leaves one of the last tokens
    {"window": 40, "sinks": 2, "held": 7, "turn": 16, "gain": "head", "relative": True},
    {"window": 3, "sinks": 4, "held": 1, "turn": 1, "gain": "none"},
    {"window": 24, "sinks": 1, "held": 20, "turn": 8, "reach": 60},
]


@pytest.fixture(autouse=True)
def canaries(monkeypatch):
    monkeypatch.setenv("ATTNGAP_DEBUG_KERNELS", "1")


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def made(layout=None, dtype=torch.float64, **options):
    options = {"feature_map": "prototype", "map_options": {"features": 11, "decay": True}} | FORMS[0] | options
    if options["feature_map"] != "prototype":
        options["map_options"] = {}
    torch.manual_seed(0)
    options = {"relative": False, "gain": "query", "kv_heads": KV, "rotary": layout} | options
    found = mechanism("hybrid", H, D, DV, **options)
    for name, x in found.named_parameters():
        x.uniform_(-8, -1) if name.endswith("log_rate") else x.add_(0.5 * torch.randn_like(x))
    return found.to(dtype)


def streams(t, seed=0, batch=B):
    generator = torch.Generator().manual_seed(seed)
    shapes = (H, D), (KV, D), (KV, DV)
    return tuple(torch.randn(batch, h, t, w, generator=generator, dtype=torch.float64) * 1.5 for h, w in shapes)


def angles(t, batch=B):
    turned = torch.rand(batch, t, 8, generator=torch.Generator().manual_seed(9), dtype=torch.float64) * 6
    return 1.3 * turned.cos(), 1.3 * turned.sin()  # scaled, as some models have them


def same(got, want, tolerance=1e-9):
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def same_state(m, got, want):
    """Where something is: rows of queries that have not come yet, and places of tokens, may hold anything.

    A cache has no features, and what they are made of in their place.
    """
    shared = got.keys() & want.keys()
    assert (got.keys() ^ want.keys()) <= {"fk", "held_fk", "at", "content", "held_content"}
    first, every = turns.spacing(m)
    for i, count in enumerate(want["count"].tolist()):
        there = {"asked": max(0, count - first) // every, "content": max(0, count - m.sinks - m.held)}
        for name in shared:
            some, other = (each[name][i] for each in (got, want))
            if name == "asked":
                some, other = (each.unflatten(1, (H // KV, -1)).flatten(0, 1) for each in (some, other))
            stop = there.get(name)
            same(*(each if stop is None else each[:, :stop] for each in (some, other)))


def cut(tokens, *which):
    return tuple(x[:, :, slice(*which)] for x in tokens)


def turn(rotary, *which):
    return None if rotary is None else tuple(x[:, slice(*which)] for x in rotary)


# --- The definition in plain loops, from the docstring of `attngap.mechanisms.turns` ---


class KeyHead:
    """What one key head of one sequence reads exactly, token by token; all by their numbers."""

    def __init__(self, m, q, k):
        self.m, self.q, self.k = m, q.tolist(), k.tolist()  # (group, t, d), (t, d)
        self.sinks, self.held, self.last, self.far = [], [], [], []
        self.score = {}

    def take(self, token):
        if len(self.sinks) < self.m.sinks:
            self.sinks.append(token)
        elif token < self.m.sinks + self.m.held:
            self.held.append(token)  # the first places are those of the first tokens
        else:
            self.last.append(token)

    @property
    def near(self):
        return self.sinks + self.held + self.last

    def logit(self, head, row, key):
        return self.m.scale * sum(a * b for a, b in zip(self.q[head][row], self.k[key], strict=True))

    def turn_if_full(self):
        """The oldest leave; they and the held compete by the squares of weights of a few queries of this turn."""
        if len(self.last) < self.m.window:
            return
        these = self.last[-self.m.turn :]
        every = self.m.turn // min(8, self.m.turn)
        asked = these[every - 1 :: every]
        scored = [token for token in self.held + self.last if token not in these]
        added = dict.fromkeys(scored, 0.0)
        for row in asked:
            read = [token for token in self.near if token <= row]
            for head in range(len(self.q)):
                weights = [math.exp(self.logit(head, row, key)) for key in read]
                for key, weight in zip(read, weights, strict=True):
                    if key in added:
                        added[key] += (weight / sum(weights)) ** 2
        for token in scored:
            self.score[token] = self.score.get(token, 0.0) / 2 + added[token]
        leaving, self.last = self.last[: self.m.turn], self.last[self.m.turn :]
        among = self.held + leaving
        best = sorted(among, key=lambda token: -self.score.get(token, 0.0))[: self.m.held]
        self.held = [token for token in among if token in best]
        self.far += [token for token in among if token not in best]


def by_loops(m, read):
    """Weights (b, h, t, t) and the tokens that each key head holds in the end."""
    b, h, t = read.q.shape[:3]
    group = h // read.k.shape[1]
    found, held = torch.zeros(b, h, t, t, dtype=torch.float64), []
    for i in range(b):
        for n in range(read.k.shape[1]):
            heads = range(n * group, (n + 1) * group)
            there = KeyHead(m, read.q[i, heads.start : heads.stop], read.k[i, n])
            for row in range(t):
                there.take(row)
                for g, head in enumerate(heads):
                    logits = {key: there.logit(g, row, key) for key in there.near}
                    gain = 0.0 if read.log_gain is None else read.log_gain[i, head, row].item()
                    gain += max(logits.values()) if m.relative else 0.0
                    for key, logit in logits.items():
                        found[i, head, row, key] = math.exp(logit)
                    for key in there.far:
                        similar = read.fq[i, head, row] @ read.fk[i, n, key]
                        found[i, head, row, key] = math.exp(gain) * similar
                there.turn_if_full()
            held.append(there.held)
    return found / found.sum(-1, keepdim=True), held


@pytest.mark.parametrize("options", FORMS, ids=str)
@pytest.mark.parametrize("layout", [None, LLAMA], ids=["as the model turned", "turned back"])
def test_every_form_is_the_definition_in_plain_loops(options, layout):
    t = 3 * options["window"] + 2 * options["held"] + 3
    m, (q, k, v) = made(layout, **options), streams(t)
    rotary = None if layout is None else angles(t)
    read = m.read(None, q, k, v, rotary=rotary)
    want, held = by_loops(m, read)
    assert sum(len(set(each) - set(range(m.sinks + m.held))) for each in held) > 0  # some were chosen
    same(m.weights(read), want)
    out = want @ v.repeat_interleave(H // KV, 1)
    same(run_steps(m, read)[0], out)
    for chunk in (None, 3):
        same(m.chunked(read, chunk=chunk)[0], out)
    with native.off():
        same(m.chunked(read)[0], out)
        got, state = read_in_turns(m, q, k, v, rotary=rotary)
        same(got, out)
    assert state["at"].flatten(0, 1).tolist() == held
    if native.available():
        got, state = read_piece(m, q, k, v, rotary=rotary)
        same(got, out)
        assert state["at"].flatten(0, 1).tolist() == held


# --- What is held ---------------------------------------------------------------------------------------------------

NEEDLES = (50, 57)


def needles(asked):
    """Two tokens that are like no others, and queries that look for one of them from the moment it is there."""
    q, k, v = (0.1 * x for x in streams(200, batch=1))
    for i, place in enumerate(NEEDLES):
        k[:, :, place, i] = 30.0
    q[:, :, NEEDLES[1] :, asked] = 1.0
    return q, k, v


@pytest.mark.parametrize("asked", [0, 1])
def test_what_is_held_is_what_queries_weigh_most(asked):
    m = made(window=24, sinks=1, held=1, turn=8)
    _, state = read_in_turns(m, *needles(asked))
    assert state["at"].flatten().tolist() == [NEEDLES[asked]] * KV
    with_other, _ = needles(1 - asked), None
    _, other = read_in_turns(m, *with_other)
    assert other["at"].flatten().tolist() == [NEEDLES[1 - asked]] * KV


def test_a_needle_is_read_exactly_for_many_turns_and_lies_far_without_held_tokens():
    options = {"feature_map": "none", "gain": "none", "window": 24, "sinks": 1, "turn": 8}
    m = made(**options, held=2)
    tokens = needles(0)
    weights = m.weights(m.read(None, *tokens))[0, :, :, NEEDLES[0]]
    exact = m.weights(m.read(None, *tokens))[0, :, :, NEEDLES[1]]
    assert weights[:, 60:].min() > 0.9  # 140 tokens are more than 17 turns
    assert exact[:, 120:].max() < 0.1
    plain = m.with_window(m.room)
    assert plain.held == 0
    lost = plain.weights(plain.read(None, *tokens))[0, :, :, NEEDLES[0]]
    assert lost[:, 60:70].min() > 0.9
    assert not lost[:, NEEDLES[0] + plain.room :].any()


def test_what_no_query_asks_for_any_more_loses_its_place():
    m = made(window=24, sinks=0, held=1, turn=8)
    q, k, v = needles(0)
    q[:, :, 120:, 0], q[:, :, 120:, 1] = 0.0, 0.0
    k[:, :, 125, 2] = 30.0
    q[:, :, 125:, 2] = 1.0
    assert read_in_turns(m, *cut((q, k, v), 120))[1]["at"].flatten().tolist() == [NEEDLES[0]] * KV
    assert read_in_turns(m, q, k, v)[1]["at"].flatten().tolist() == [125] * KV


def test_values_and_features_do_not_choose():
    m, (q, k, v) = made(), streams(60)
    other = made(feature_map="hedgehog", gain="head")
    places = [read_in_turns(each, q, k, x)[1]["at"] for each, x in ((m, v), (m, 9 * v.flip(2)), (other, v))]
    assert torch.equal(places[0], places[1])
    assert torch.equal(places[0], places[2])
    assert not torch.equal(places[0], read_in_turns(m, -q, k, v)[1]["at"])


# --- Options and room -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"window": 8, "turn": 8},
            "a turn of held tokens must be shorter than the window of 8 and, from 8 on, a multiple",
        ),
        ({"window": 4, "turn": 32}, "shorter than the window of 4 and, from 8 on, a multiple of 8, got 32"),
        ({"window": 64, "turn": 20}, "a multiple of 8, got 20"),
        ({"window": 64, "turn": 0}, "hybrid: turn must be"),
        ({"held": -1}, "hybrid: held must be"),
        ({"held": 2.5}, "hybrid option held must be int, got 2.5"),
    ],
    ids=str,
)
def test_options_that_cannot_be_are_refused(options, message):
    with pytest.raises(AttngapError, match=message):
        mechanism("hybrid", H, D, DV, **{"held": 2, "window": 16, "turn": 8} | options)


def test_without_held_tokens_a_turn_means_nothing():
    m = mechanism("hybrid", H, D, DV, window=8, turn=8)
    assert (m.held, m.turn, m.room, m.slots) == (0, 0, 8, 12)


def test_a_state_from_keys_and_values_alone_is_refused():
    _, k, v = streams(30)
    with pytest.raises(
        AttngapError, match="what turns leave depends on queries too; feed the tokens, or take with_window"
    ):
        made().state_after(k, v)
    made().with_window(5).state_after(k, v)


@pytest.mark.parametrize("layout", [None, LLAMA], ids=["no positions", "turned back"])
@pytest.mark.parametrize(
    ("heads", "kv", "dim", "dv"), [(9, 3, 64, 64), (8, 8, 128, 128), (32, 4, 128, 64), (4, 1, 8, 8)]
)
@pytest.mark.parametrize("window", [256, 512, 600, 1536])
@pytest.mark.parametrize("share", [0.05, 0.2, 0.5])
def test_sharing_takes_no_more_room(window, heads, kv, dim, dv, layout, share):
    plain = mechanism("hybrid", heads, dim, dv, kv_heads=kv, window=window, rotary=layout, feature_map="prototype")
    found = plain.sharing(share)
    if not found:  # what there is to hold besides would not fit
        assert window < 4 * turns.SHORTEST + heads // kv * turns.QUERIES or share > 0.2
        return
    assert found["held"] == round(share * window)
    assert turns.SHORTEST <= found["turn"] <= turns.LONGEST
    shared = mechanism(
        "hybrid", heads, dim, dv, kv_heads=kv, rotary=layout, feature_map="prototype", sinks=plain.sinks, **found
    )
    pairs = 0 if layout is None else dim // 2
    got, most = held_floats(shared, 4096, pairs), held_floats(plain, 4096, pairs)
    assert got <= most
    assert most - got <= 2 * kv * (dim + dv) + 2 * (window - shared.window) * pairs  # of which next to nothing is left
    assert abs(shared.room - window) <= 2


@pytest.mark.parametrize("options", FORMS, ids=str)
@pytest.mark.parametrize("layout", [None, LLAMA], ids=["no positions", "turned back"])
def test_room_is_that_of_a_plain_window_that_takes_as_much(options, layout):
    m = made(layout, **options)
    plain = m.with_window(m.room)
    apart = held_floats(m, 99, 0) - held_floats(plain, 99, 0)
    assert abs(apart) <= m.kv_heads * (D + DV) / 2 + 1


def test_a_window_that_is_too_small_is_not_shared():
    for window in (1, 8, 32, 63):
        assert mechanism("hybrid", 9, 64, kv_heads=3, window=window).sharing(0.2) == {}
    assert mechanism("hybrid", 9, 64, kv_heads=3, window=512).sharing(0.0) == {}
    assert mechanism("hybrid", 9, 64, kv_heads=3, window=512).sharing(0.9) == {}  # no turn would be left
    assert mechanism("hybrid", 9, 64, kv_heads=3, window=512).sharing(0.0005) == {}


@pytest.mark.parametrize("options", FORMS, ids=str)
@pytest.mark.parametrize("layout", [None, LLAMA], ids=["no positions", "turned back"])
def test_the_floats_of_a_cache_are_counted(options, layout):
    from attngap.mechanisms.held import hold

    m, t = made(layout, **options), 70
    rotary = None if layout is None else angles(t)
    held = hold(m, read_in_turns(m, *streams(t), rotary=rotary)[1], rotary)
    floats = sum(x.numel() * (2 if name == "at" else 1) for name, x in held.items() if name not in ("count", "gone"))
    assert floats == B * held_floats(m, t, 0 if layout is None else 4)


# --- Form against form ----------------------------------------------------------------------------------------------

LONG = {"window": 40, "sinks": 2, "held": 10, "turn": 16}  # 52 slots; turns at 52, 68, 84, ...


def in_pieces(m, tokens, sizes, rotary=None, mask=None, skipped=None, read=read_piece):
    state, at, outs, start = None, 0, [], torch.zeros(len(tokens[0]), dtype=torch.long)
    for size in sizes:
        real = None if mask is None else mask[:, at : at + size]
        given = {"state": state, "start": start, "mask": real, "rotary": turn(rotary, at, at + size)}
        out, state = read(m, *cut(tokens, at, at + size), **given, skipped=skipped)
        outs.append(out)
        start = start + (size if real is None else real.sum(1))
        at += size
    return torch.cat(outs, 2), state


@COMPILED
@pytest.mark.parametrize("layout", [None, LLAMA], ids=["no positions", "turned back"])
@pytest.mark.parametrize("batch", [1, B])
@pytest.mark.parametrize("t", [2, 11, 12, 13, 51, 52, 53, 67, 68, 69, 83, 84, 85, 99, 100, 116, 52 + 16 * 17, 331])
def test_compiled_pieces_are_those_of_torch_and_steps_at_every_length(t, batch, layout):
    m, tokens = made(layout, **LONG), streams(t, batch=batch)
    rotary = None if layout is None else angles(t, batch)
    got, state = read_piece(m, *tokens, rotary=rotary)
    with native.off():
        read = m.read(None, *tokens, rotary=rotary)
        want, after = m.chunked(read)
        in_torch, other = read_in_turns(m, *tokens, rotary=rotary)
    same(got, want)
    same(in_torch, want)
    same_state(m, other, state)
    same_state(m, state, after)
    if t < 120:
        steps, by_steps = run_steps(m, read)
        same(steps, want)
        same_state(m, by_steps, after)


@pytest.mark.parametrize("layout", [None, LLAMA], ids=["no positions", "turned back"])
@pytest.mark.parametrize("kernels", [pytest.param(True, marks=COMPILED), False], ids=["compiled", "torch"])
@pytest.mark.parametrize(
    "sizes",
    [
        (50, 2, 148),
        (1, 12, 40, 147),
        (11, 2, 39, 16, 16, 33, 83),
        (52, 148),
        (51, 65, 84),
        (100, 100),
        (7,) * 28 + (4,),
    ],
    ids=str,
)
def test_states_carry_over_any_cut(sizes, layout, kernels):
    m, tokens = made(layout, **LONG), streams(200, batch=1)
    rotary = None if layout is None else angles(200, 1)
    want, after = read_in_turns(m, *tokens, rotary=rotary)
    with contextlib.nullcontext() if kernels else native.off():
        got, state = in_pieces(m, tokens, sizes, rotary, read=read_in_turns)
    same(got, want)
    same_state(m, state, after)


@COMPILED
@pytest.mark.parametrize("sizes", [(170,), (60, 110)], ids=str)
def test_skipped_heads_are_left_out_and_the_others_are_what_they_were(sizes):
    m, tokens, rotary = made(LLAMA, **LONG), streams(170, batch=1), angles(170, 1)
    skipped = torch.tensor([0, 1, 0, 1, 1, 1])
    want, after = read_in_turns(m, *tokens, rotary=rotary)
    got, state = in_pieces(m, tokens, sizes, rotary, skipped=skipped)
    same(got[:, skipped == 0], want[:, skipped == 0])
    for name in state.keys() - {"count", "gone", "asked"}:
        same(state[name][:, 0], after[name][:, 0])


@pytest.mark.parametrize("layout", [None, LLAMA], ids=["no positions", "turned back"])
@pytest.mark.parametrize("kernels", [pytest.param(True, marks=COMPILED), False], ids=["compiled", "torch"])
@pytest.mark.parametrize("sizes", [(150,), (49, 1, 30, 70)], ids=str)
def test_sequences_that_differ_in_length_and_padding_are_what_they_are_alone(sizes, layout, kernels):
    m, tokens = made(layout, **LONG), streams(150, batch=3)
    rotary = None if layout is None else angles(150, 3)
    mask = torch.ones(3, 150, dtype=torch.bool)
    mask[0, :37], mask[1, 20:31], mask[1, 140:], mask[2, :149] = False, False, False, False
    with contextlib.nullcontext() if kernels else native.off():
        got, state = in_pieces(m, tokens, sizes, rotary, mask, read=read_in_turns)
        read = m.read(None, *tokens, mask=mask, rotary=rotary)
        same(m.chunked(read)[0], got)
    for i in range(3):
        alone = tuple(x[i : i + 1, :, mask[i]] for x in tokens)
        here = None if rotary is None else tuple(x[i : i + 1, mask[i]] for x in rotary)
        want, after = read_in_turns(m, *alone, rotary=here)
        same(got[i : i + 1, :, mask[i]], want)
        assert not got[i, :, ~mask[i]].any()
        same_state(m, {name: x[i : i + 1] for name, x in state.items()}, after)


@COMPILED
def test_a_long_prompt_in_single_precision_is_that_in_double():
    m, tokens, rotary = made(LLAMA, **LONG), streams(900, batch=1), angles(900, 1)
    want, _ = read_in_turns(m, *tokens, rotary=rotary)
    single = tuple(x.float() for x in tokens), tuple(x.float() for x in rotary)
    got, _ = read_piece(made(LLAMA, torch.float32, **LONG), *single[0], rotary=single[1])
    same(got.double(), want, 1e-4)


def test_gradients_through_pieces_are_those_of_one_pass():
    """Also with what a cache holds, which nothing may overwrite."""
    m, tokens, rotary = made(LLAMA), streams(40, batch=1), angles(40, 1)

    def gradients(run):
        leaves = [x.clone().requires_grad_() for x in tokens]
        with torch.enable_grad():
            out = run(leaves)
            wanted = [*leaves, *(x for x in m.parameters() if x.requires_grad)]
            return torch.autograd.grad((out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum(), wanted)

    want = gradients(lambda x: m.chunked(m.read(None, *x, rotary=rotary))[0])
    got = gradients(lambda x: in_pieces(m, x, (3, 1, 2, 20, 14), rotary, read=read_in_turns)[0])
    for a, b in zip(got, want, strict=True):
        same(a, b)


def test_a_share_of_nothing_and_a_window_too_small_leave_a_mechanism_as_it_is():
    wide = made(window=512, held=0, turn=32).with_held(0.2)
    assert wide.held == 102
    assert wide.room == pytest.approx(512, abs=1)
    for other in (made(window=512, held=0, turn=32).with_held(0.0), made(window=64, held=0, turn=32).with_held(0.2)):
        assert (other.held, other.turn) == (0, 0)
