"""Converted models that hold tokens from anywhere: one model however its text comes in, in caches of known size."""

import contextlib
import copy
import json

import pytest
import torch
from transformers import DynamicCache

import attngap
from attngap.mechanisms.decoding import Decoder
from attngap.mechanisms.held import held_floats
from attngap.models.cache import cache_bytes
from attngap.models.mixed import mixed_heads
from attngap.models.positions import layer_positions
from attngap.models.prefill import exact_prefill
from attngap.models.swap import empty_cache, swap
from attngap.ops import native
from tests import zoo

HELD = {"window": 20, "sinks": 2, "held": 3, "turn": 8}  # 25 slots; turns after 25, 33, 41, ... tokens
KEEP = {0: [1], 1: [0, 1]}  # of the second layer's first key head no state is needed
KERNELS = pytest.mark.skipif(not native.available(), reason="numba is not installed")
CLOSE = {"atol": 1e-4, "rtol": 1e-4}


def converted(name="llama", dtype=None, keep=KEEP, **options):
    model = zoo.tiny(name)
    if dtype is not None:
        model = model.to(dtype)
    turned = layer_positions(model)[0].options()
    options = {"map_options": {"decay": True}} | HELD | turned | options
    return swap(model, {layer: (m, keep[layer]) for layer, m in zoo.mechanisms(model, **options).items()})


def parts(model):
    return [part.mechanism for part in mixed_heads(model).values()]


def torch_alone(yes):
    return native.off() if yes else contextlib.nullcontext()


@torch.no_grad()
def whole(model, tokens, **options):
    return model(tokens, use_cache=False, **options).logits


@torch.no_grad()
def in_pieces(model, tokens, sizes, mask=None, cache=None):
    cache, found, at = empty_cache(model) if cache is None else cache, [], 0
    for part in tokens.split(sizes, 1):
        at += part.shape[1]
        given = {} if mask is None else {"attention_mask": mask[:, :at]}
        if mask is not None:
            given["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)[:, at - part.shape[1] : at]
        found.append(model(part, past_key_values=cache, **given).logits)
    return torch.cat(found, 1), cache


SIZES = [
    [90],
    [31, 59],
    [2, 3, 1, 1, 18, 1, 64],
    [24, 1, 65],
    [25, 1, 7, 1, 56],
    [1] * 90,
    [22, *[1] * 68],
    [7] * 12 + [6],
]


@pytest.mark.parametrize("alone", [pytest.param(False, marks=KERNELS), True], ids=["compiled", "torch"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("feature_map", ["prototype", "hedgehog", "none"])
def test_logits_do_not_depend_on_how_text_comes_in(feature_map, sizes, alone):
    options = {} if feature_map == "prototype" else {"map_options": {}}
    model, tokens = converted(feature_map=feature_map, **options), zoo.tokens(2, 90)
    with native.off():
        want = whole(model, tokens)
    with torch_alone(alone):
        got, cache = in_pieces(model, tokens, sizes)
        torch.testing.assert_close(whole(model, tokens), want, **CLOSE)
    torch.testing.assert_close(got, want, **CLOSE)
    assert cache.layers[1].heads.tolist() == [1]
    assert cache.layers[1].state["at"].shape == (2, 1, 3)
    chosen = cache.layers[0].state["at"]
    assert (chosen > 4).any()  # other tokens than the first


def test_what_is_held_makes_a_difference():
    model, tokens = converted(), zoo.tokens(2, 90)
    plain = swap(zoo.tiny(), {i: (m.between, KEEP[i]) for i, m in enumerate(parts(model))})
    with_held, without = whole(model, tokens), whole(plain, tokens)
    torch.testing.assert_close(with_held[:, :25], without[:, :25], **CLOSE)
    assert (with_held - without)[:, 40:].abs().max() > 0.1


@KERNELS
def test_tokens_are_compiled_calls_also_right_after_turns(monkeypatch):
    calls = []
    token = Decoder.token
    monkeypatch.setattr(Decoder, "token", lambda self, *args: calls.append(1) or token(self, *args))
    model, tokens = converted(), zoo.tokens(1, 80)
    _, cache = in_pieces(model, tokens[:, :30], [30])
    laid_out = []
    for i in range(30, 80):
        in_pieces(model, tokens[:, i : i + 1], [1], cache=cache)
        laid_out.append(cache.layers[0].decoder)
    assert len(calls) == 50 * 2
    assert all(each is laid_out[0] for each in laid_out)  # turns overwrite what it was laid out for


@pytest.mark.parametrize("alone", [pytest.param(False, marks=KERNELS), True], ids=["compiled", "torch"])
@pytest.mark.parametrize("sizes", [[70], [28, 42], [20, *[1] * 50]], ids=str)
@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_padded_sequences_are_what_they_are_alone(side, sizes, alone):
    """Of different lengths, so that their turns come at different tokens."""
    model, tokens = converted(), zoo.tokens(3, 70)
    mask = torch.ones(3, 70, dtype=torch.long)
    if side != "right":
        mask[0, :13], mask[1, :18] = 0, 0
    if side != "left":
        mask[1, 51:], mask[2, 65:] = 0, 0
    with torch_alone(alone):
        got, _ = in_pieces(model, tokens, sizes, mask)
        for i in range(3):
            here = mask[i].bool()
            want = whole(model, tokens[i : i + 1, here])
            torch.testing.assert_close(got[i : i + 1, here], want, **CLOSE)


def generate(model, tokens, **options):
    options = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0} | options
    return model.generate(tokens, attention_mask=options.pop("attention_mask", torch.ones_like(tokens)), **options)


def test_batches_of_different_lengths_are_generated_as_each_alone():
    model, tokens = converted(), zoo.tokens(2, 30)
    mask = torch.ones_like(tokens)
    mask[1, :11] = 0
    got = generate(model, tokens * mask, attention_mask=mask)
    assert torch.equal(got[:1], generate(model, tokens[:1]))
    assert torch.equal(got[1:, 11:], generate(model, tokens[1:, 11:]))
    assert torch.equal(got, generate(model, tokens * mask, attention_mask=mask, use_cache=False))


@pytest.mark.parametrize("name", zoo.DECODERS)
def test_every_decoder_generates_alike_with_and_without_a_cache(name):
    options = {} if name != "gpt2" else {"reach": 60, "map_options": {"decay": True}}
    model, tokens = converted(name, **options), zoo.tokens(1, 23)
    want = generate(model, tokens, use_cache=False)
    assert torch.equal(generate(model, tokens), want)
    assert torch.equal(generate(model, tokens, prefill_chunk_size=7), want)
    if name == "gpt2":
        assert all(m.rotary is None and m.reach == 60 for m in parts(model))


def test_gpt2_reads_far_keys_as_far_as_features_reach():
    model, tokens = converted("gpt2", reach=60), zoo.tokens(2, 90)
    with native.off():
        want = whole(model, tokens)
    for sizes in ([90], [30, 60], [20, *[1] * 70]):
        torch.testing.assert_close(in_pieces(model, tokens, sizes)[0], want, **CLOSE)


def test_beams_are_reordered():
    model, tokens = converted(), zoo.tokens(1, 23)
    found = generate(model, tokens, num_beams=3, num_return_sequences=2)
    assert torch.equal(found, generate(model, tokens, num_beams=3, num_return_sequences=2, use_cache=False))


def test_assisted_and_prompt_lookup_decoding_give_the_same_tokens():
    model, tokens = converted(), zoo.tokens(1, 23)
    expected = generate(model, tokens)
    assert torch.equal(generate(model, tokens, prompt_lookup_num_tokens=4), expected)
    assert torch.equal(generate(model, tokens, assistant_model=zoo.tiny()), expected)


@torch.no_grad()
@pytest.mark.parametrize("before", [0, 3, 23, 24, 25, 30, 32, 33])
@pytest.mark.parametrize("alone", [pytest.param(False, marks=KERNELS), True], ids=["compiled", "torch"])
def test_tokens_are_taken_back_over_a_turn(before, alone):
    model, tokens = converted(), zoo.tokens(2, 70)
    other = zoo.tokens(2, 12, seed=5)
    with torch_alone(alone):
        cache = empty_cache(model)
        if before:
            in_pieces(model, tokens[:, :before], [before], cache=cache)
        cache.activate_past_recording()
        for sizes, back in (([12], 12), ([1] * 12, 11), ([5, 1, 6], 12)):
            in_pieces(model, other, sizes, cache=cache)
            cache.crop(-back)
        middle = other[:, :1]
        got, _ = in_pieces(model, tokens[:, before:], [1, 3, 65 - before, 1], cache=cache)
        want = whole(model, torch.cat((tokens[:, :before], middle, tokens[:, before:]), 1))
    torch.testing.assert_close(got, want[:, before + 1 :], **CLOSE)


@torch.no_grad()
def test_copies_and_chosen_sequences_go_on_by_themselves():
    model, tokens = converted(), zoo.tokens(1, 80)
    _, cache = in_pieces(model, tokens[:, :31], [30, 1])
    want = whole(model, tokens)
    copied = copy.deepcopy(cache)
    for _ in range(2):  # over a turn, and nothing of it in the copy
        each = copy.deepcopy(copied)
        torch.testing.assert_close(in_pieces(model, tokens[:, 31:], [1] * 49, cache=each)[0], want[:, 31:], **CLOSE)
    cache.batch_repeat_interleave(3)
    cache.batch_select_indices(torch.tensor([0, 2]))
    other = torch.cat((tokens, torch.cat((tokens[:, :31], zoo.tokens(1, 49, seed=7)), 1)))
    got, _ = in_pieces(model, other[:, 31:], [1] * 30 + [19], cache=cache)
    torch.testing.assert_close(got, whole(model, other)[:, 31:], **CLOSE)
    cache.reorder_cache(torch.tensor([1, 0]))
    more = zoo.tokens(2, 20, seed=8)
    got, _ = in_pieces(model, more, [1] * 12 + [8], cache=cache)
    torch.testing.assert_close(got, whole(model, torch.cat((other.flip(0), more), 1))[:, 80:], **CLOSE)
    cache.reset()
    torch.testing.assert_close(in_pieces(model, tokens, [40, 40], cache=cache)[0], want, **CLOSE)


@pytest.mark.parametrize("alone", [pytest.param(False, marks=KERNELS), True], ids=["compiled", "torch"])
def test_half_precision_is_near_single(alone):
    """Scores are in single precision, but of rounded queries and keys: what is held may differ here and there."""
    model, tokens = converted(dtype=torch.bfloat16), zoo.tokens(2, 70)
    with torch_alone(alone):
        want = whole(model, tokens)
        assert want.dtype == torch.bfloat16
        for sizes in ([70], [30, 40], [20, *[1] * 50]):
            got, cache = in_pieces(model, tokens, sizes)
            assert (got - want).float().norm() < 0.03 * want.float().norm(), sizes
    assert cache.layers[0].state["S"].dtype == cache.layers[0].state["asked"].dtype == torch.float32


def test_gradients_go_through_a_cache():
    model, tokens = converted(), zoo.tokens(1, 60)

    def gradients(run):
        model.zero_grad()
        run().float().square().sum().backward()
        return {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}

    def cached():
        cache, found = empty_cache(model), []
        for part in tokens.split([20, 1, 1, 5, 33], 1):
            found.append(model(part, past_key_values=cache).logits)
        return torch.cat(found, 1)

    want, got = gradients(lambda: model(tokens, use_cache=False).logits), gradients(cached)
    assert want.keys() == got.keys()
    for name, x in want.items():
        torch.testing.assert_close(got[name], x, atol=1e-3 * x.abs().max().item() + 1e-6, rtol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_cache_is_as_large_as_is_said(name):
    model = converted(name, keep={0: [], 1: []})
    pairs = {"llama": 4, "gpt2": 0}[name]
    for tokens in (5, 30, 90):
        _, cache = in_pieces(model, zoo.tokens(2, tokens), [tokens])
        floats = sum(held_floats(m, tokens, pairs) for m in parts(model))
        counts = sum(x.numel() for each in cache.layers for x in (each.count, each.state["count"], each.state["gone"]))
        assert cache_bytes(cache) == 2 * 4 * floats + 8 * counts


@torch.no_grad()
@pytest.mark.parametrize("held", [0.0, 0.4])
@pytest.mark.parametrize("alone", [pytest.param(False, marks=KERNELS), True], ids=["compiled", "torch"])
def test_a_prompt_that_was_read_exactly_goes_on(held, alone, monkeypatch):
    monkeypatch.setattr("attngap.models.prefill.NARROWEST", 8)
    model, tokens = converted(), zoo.tokens(2, 90)
    with torch_alone(alone):
        cache = exact_prefill(model, tokens[:, :60], held)
        room = parts(model)[0].room
        more = round(held * room)
        assert cache.layers[0].form == (room - more, 2 + more)
        at_once, _ = in_pieces(model, tokens[:, 60:], [30], cache=copy.deepcopy(cache))
        by_token, _ = in_pieces(model, tokens[:, 60:], [1] * 30, cache=copy.deepcopy(cache))
        torch.testing.assert_close(at_once, by_token, **CLOSE)
        cache.activate_past_recording()
        in_pieces(model, tokens[:, 60:70] - 1, [10], cache=cache)
        cache.crop(-10)
        torch.testing.assert_close(in_pieces(model, tokens[:, 60:], [10, 20], cache=cache)[0], at_once, **CLOSE)
    cache.reset()
    torch.testing.assert_close(in_pieces(model, tokens, [90], cache=cache)[0], whole(model, tokens), **CLOSE)


@torch.no_grad()
def test_a_prompt_that_was_read_exactly_leaves_a_cache_of_the_same_size():
    model = converted(keep={0: [], 1: []})
    exact, own = exact_prefill(model, zoo.tokens(1, 60), 0.0), in_pieces(model, zoo.tokens(1, 60), [60])[1]
    m = parts(model)[0]
    turned = 2 * 2 * 4 * 4 * (m.room - m.window)  # cos and sin of as many more rows, in two layers
    floats = m.kv_heads * (m.dim + m.value_dim) / 2 * 4 * 2
    assert abs(cache_bytes(exact) - turned - cache_bytes(own)) <= floats + 64


@torch.no_grad()
def test_a_window_over_all_of_an_exact_prompt_goes_on_as_the_original_does():
    model, tokens = converted(window=60, turn=32), zoo.tokens(1, 62)
    cache = exact_prefill(model, tokens[:, :50])
    got, _ = in_pieces(model, tokens[:, 50:], [5, *[1] * 7], cache=cache)
    torch.testing.assert_close(got, zoo.tiny()(tokens).logits[:, 50:], **CLOSE)


@pytest.mark.parametrize("alone", [pytest.param(False, marks=KERNELS), True], ids=["compiled", "torch"])
def test_a_text_that_slots_hold_is_the_original(alone):
    model, tokens = converted(), zoo.tokens(2, 25)
    want = whole(zoo.tiny(), tokens)
    with torch_alone(alone):
        for sizes in ([25], [24, 1], [10, 15], [1] * 25):
            torch.testing.assert_close(in_pieces(model, tokens, sizes)[0], want, **CLOSE)


def test_a_folder_of_before_and_one_with_held_tokens_load(tmp_path):
    from tests.conversion.small import TEXT, plan
    from tests.models.test_save import QUICK

    zoo.tiny().save_pretrained(tmp_path / "base")
    zoo.tokenizer().save_pretrained(tmp_path / "base")
    model, words = attngap.load(tmp_path / "base")
    made = plan(model)
    made = made.model_copy(update={"model": made.model.model_copy(update={"name": str(tmp_path / "base")})})
    for folder, options, held in (("new", {"window": 160}, True), ("old", {"window": 160, "held": 0.0}, False)):
        done, _ = attngap.linearize(model, words, made, TEXT, **(QUICK | options))
        attngap.save(done, tmp_path / folder, tokenizer=words)
        record = json.loads((tmp_path / folder / "attngap.json").read_text())
        assert all(("held" in layer["options"]) == held for layer in record["layers"])
        again, _ = attngap.load(tmp_path / folder)
        ids = zoo.tokens(1, 240)
        assert [(m.window, m.held, m.turn) for m in parts(again)] == [(m.window, m.held, m.turn) for m in parts(done)]
        assert all((m.held > 0) == held for m in parts(again))
        assert torch.equal(whole(again, ids), whole(done, ids))
        cached = in_pieces(again, ids, [100, 140], cache=DynamicCache())[0]
        torch.testing.assert_close(cached, whole(done, ids), **CLOSE)
