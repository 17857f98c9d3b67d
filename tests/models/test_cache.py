import copy

import pytest
import torch
from transformers import BartConfig, BartForConditionalGeneration, DynamicCache, StaticCache

from attngap.errors import AttngapError
from attngap.heads.replacement import build_replacement
from attngap.models.cache import cache_bytes, fill
from attngap.models.compat import tokens_in
from attngap.models.mixed_layer import MixedLayer
from attngap.models.plan import Replacement
from attngap.models.shapes import layer_shapes
from attngap.models.swap import empty_cache, swap
from tests.zoo import DECODERS, VOCABULARY, mechanisms, tiny

PROMPT = torch.randint(1, VOCABULARY, (1, 23), generator=torch.Generator().manual_seed(2))
KEEP = {"head": {0: [1], 1: [0, 1]}, "none": {0: [], 1: []}}


def converted(name="llama", keep="head", mechanism="hybrid"):
    model = tiny(name)
    return swap(model, {layer: (m, KEEP[keep][layer]) for layer, m in mechanisms(model, mechanism).items()})


def generate(model, tokens=PROMPT, **options):
    options = {"max_new_tokens": 20, "do_sample": False} | options
    return model.generate(tokens, attention_mask=options.pop("attention_mask", torch.ones_like(tokens)), **options)


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("keep", KEEP)
@pytest.mark.parametrize("mechanism", ["hybrid", "hedgehog"])
def test_cached_uncached_and_chunked_give_the_same_tokens(name, keep, mechanism):
    model = converted(name, keep, mechanism)
    expected = generate(model, use_cache=False)
    assert torch.equal(generate(model), expected)
    assert torch.equal(generate(model, prefill_chunk_size=7), expected)


def lengths_read(model, monkeypatch, **options):
    """How many tokens each call of a model is given while it generates from PROMPT, and what it generates."""
    forward, seen = model.forward, []

    def watch(*args, **given):
        seen.append(
            next(given[name] for name in ("input_ids", "inputs_embeds") if given.get(name) is not None).shape[1]
        )
        return forward(*args, **given)

    monkeypatch.setattr("attngap.models.twin.PIECE", 8)
    monkeypatch.setattr(model, "forward", watch)
    return generate(model, max_new_tokens=2, **options), seen


@pytest.mark.parametrize(
    ("options", "lengths"),
    [
        ({}, [8, 8, 7, 1]),
        ({"num_beams": 2}, [8, 8, 7, 1]),
        ({"prefill_chunk_size": 20}, [20, 3, 1]),
        ({"use_cache": False}, [23, 24]),
        ({"inputs_embeds": torch.ones(1, 23, 32)}, [23, 1]),
    ],
    ids=str,
)
def test_a_long_prompt_is_read_in_pieces_where_nothing_else_is_asked_for(options, lengths, monkeypatch):
    model = converted()
    if "inputs_embeds" in options:
        options = {"inputs_embeds": model.get_input_embeddings()(PROMPT).detach()}
    beams = {name: x for name, x in options.items() if name == "num_beams"}
    want = generate(model, max_new_tokens=2, use_cache=False, **beams)
    found, seen = lengths_read(model, monkeypatch, **options)
    assert seen == lengths
    assert torch.equal(found, want)


def test_what_an_encoder_reads_is_not_cut(monkeypatch):
    """Its mask would be, at the length of the decoder's prompt."""
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    sizes |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "vocab_size": VOCABULARY}
    torch.manual_seed(0)
    special = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
    model = BartForConditionalGeneration(BartConfig(**sizes, **special, max_position_embeddings=64)).eval()
    shapes = [shape for shape in layer_shapes(model) if shape.obstacle is None]
    model = swap(model, {s.layer: (build_replacement(s, Replacement(window=8, sinks=2))[0], [0]) for s in shapes})
    seen = []
    model.register_forward_pre_hook(lambda _, args, given: seen.append(given["attention_mask"]), with_kwargs=True)
    monkeypatch.setattr("attngap.models.twin.PIECE", 8)
    generate(model, max_new_tokens=3)
    assert [mask.shape[1] for mask in seen] == [23, 23, 23]


def test_cached_logits_equal_uncached_ones_token_by_token():
    model = converted()
    cache = DynamicCache()
    with torch.no_grad():
        whole = model(PROMPT, use_cache=False).logits
        pieces = [model(piece, past_key_values=cache).logits for piece in PROMPT.split([9, 1, 1, 5, 7], 1)]
    torch.testing.assert_close(torch.cat(pieces, 1), whole, atol=2e-4, rtol=1e-4)


def test_sampling_repeats_with_and_without_a_cache():
    model = converted()
    runs = []
    for use_cache in (True, False):
        torch.manual_seed(3)
        runs.append(generate(model, do_sample=True, use_cache=use_cache))
    assert torch.equal(*runs)


def test_beams_are_reordered():
    model = converted()
    found = generate(model, num_beams=3, num_return_sequences=2)
    assert torch.equal(found, generate(model, num_beams=3, num_return_sequences=2, use_cache=False))
    assert found.shape[0] == 2


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_left_padded_batches_give_what_each_prompt_gives_alone(name):
    model = converted(name)
    other = PROMPT.flip(1)[:, :11]
    filler = torch.zeros(1, 12, dtype=torch.long)
    batch = torch.cat((PROMPT, torch.cat((filler, other), 1)))
    mask = torch.cat((torch.ones_like(PROMPT), torch.cat((filler, torch.ones_like(other)), 1)))
    found = generate(model, batch, attention_mask=mask)
    assert torch.equal(found[0], generate(model)[0])
    assert torch.equal(found[1, 12:], generate(model, other)[0])


def test_a_second_turn_continues_from_the_first():
    model = converted()
    cache = DynamicCache()
    first = generate(model, past_key_values=cache)
    longer = torch.cat((first, PROMPT), 1)
    assert torch.equal(generate(model, longer, past_key_values=cache), generate(model, longer))


def test_replaced_heads_use_constant_memory_and_kept_groups_grow():
    sizes = {}
    for keep in KEEP:
        model = converted(keep=keep)
        cache = DynamicCache()
        sizes[keep] = []
        for new in (20, 40, 40):
            with torch.no_grad():
                model(torch.randint(1, VOCABULARY, (1, new)), past_key_values=cache)
            sizes[keep].append(cache_bytes(cache))
    assert len(set(sizes["none"])) == 1
    # Layer 0 keeps one head of group 0, layer 1 both of group 0: one group each, keys and values, 8 floats of 4 bytes.
    # 20 tokens and their spare room hold 60 too; 100 need more.
    assert sizes["head"][1] == sizes["head"][0]
    assert sizes["head"][2] - sizes["head"][1] == 2 * (100 - 20) * 2 * 8 * 4


def test_the_cache_of_a_group_is_dropped_when_all_its_heads_are_replaced():
    model = converted()
    cache = DynamicCache()
    with torch.no_grad():
        model(PROMPT, past_key_values=cache)
    assert [type(layer) for layer in cache.layers] == [MixedLayer, MixedLayer]
    assert cache.layers[0].keys.shape == (1, 1, 23, 8)
    assert cache.get_seq_length() == 23
    cache.reset()
    assert cache.get_seq_length() == 0


def test_batches_can_be_repeated_and_chosen_from():
    model = converted()
    cache = DynamicCache()
    with torch.no_grad():
        model(PROMPT, past_key_values=cache)
        cache.batch_repeat_interleave(3)
        cache.batch_select_indices(torch.tensor([0, 2]))
        pair = model(PROMPT[:, :1].repeat(2, 1), past_key_values=cache).logits
        alone = model(torch.cat((PROMPT, PROMPT[:, :1]), 1), use_cache=False).logits[:, -1:]
    torch.testing.assert_close(pair, alone.repeat(2, 1, 1), atol=2e-4, rtol=1e-4)


def test_decoding_overwrites_its_own_state_and_no_copy_of_it():
    model = converted()
    cache = DynamicCache()
    token = PROMPT[:, :1]
    with torch.no_grad():
        model(PROMPT, past_key_values=cache)
        saved = copy.deepcopy(cache)
        place = cache.layers[0].state["S"].data_ptr()
        first = model(token, past_key_values=cache).logits
        assert cache.layers[0].state["S"].data_ptr() == place
        assert torch.equal(model(token, past_key_values=copy.deepcopy(saved)).logits, first)
    tracked = model(token, past_key_values=saved).logits  # with gradients nothing is overwritten
    torch.testing.assert_close(tracked, first)
    tracked.sum().backward()
    assert model.get_submodule("model.layers.0.self_attn.q_proj").weight.grad.isfinite().all()


def test_caches_of_another_kind_are_refused():
    model, original = converted(), tiny()
    with pytest.raises(AttngapError, match="needs a new DynamicCache, got a StaticCache"):
        model(PROMPT, past_key_values=StaticCache(config=model.config, max_cache_len=64))
    filled = DynamicCache()
    with torch.no_grad():
        original(PROMPT, past_key_values=filled)
    with pytest.raises(AttngapError, match="got a DynamicCache with 23 tokens of another model"):
        model(PROMPT, past_key_values=filled)


def test_a_model_that_drops_the_cache_on_the_way_is_told_so():
    layer = MixedLayer(torch.tensor([0]))
    k = torch.zeros(1, 2, 3, 4)
    layer.update(k, k)
    with pytest.raises(AttngapError, match="fills its cache without attending to it"):
        layer.update(k, k)


def test_assisted_and_prompt_lookup_decoding_give_the_same_tokens():
    model = converted()
    expected = generate(model)
    assert torch.equal(generate(model, prompt_lookup_num_tokens=4), expected)
    assert torch.equal(generate(model, assistant_model=tiny()), expected)
    assert torch.equal(generate(tiny(), assistant_model=model), generate(tiny()))


def test_all_tokens_of_a_cache_that_recorded_from_the_start_can_be_taken_back():
    model = converted()
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        exact = model(PROMPT, past_key_values=cache).logits
        cache = empty_cache(model)
        cache.activate_past_recording()
        model(PROMPT - 1, past_key_values=cache)
        cache.crop(-PROMPT.shape[1])
        found = model(PROMPT, past_key_values=cache).logits
    torch.testing.assert_close(found, exact)


def test_a_cropped_cache_goes_on_as_if_the_tokens_had_not_been():
    model = converted()
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(PROMPT, past_key_values=cache)
        cache.activate_past_recording()
        for length, taken_back in ((5, 3), (4, 4), (2, 0)):
            model(PROMPT[:, :length] + 1, past_key_values=cache)
            cache.crop(-taken_back)
        whole = torch.cat((PROMPT, PROMPT[:, :2] + 1, PROMPT[:, :2] + 1, PROMPT[:, :1]), 1)
        found = model(PROMPT[:, :1], past_key_values=cache).logits
        exact = model(whole, use_cache=False).logits[:, -1:]
    torch.testing.assert_close(found, exact, atol=2e-4, rtol=1e-4)


def test_what_was_not_recorded_cannot_be_taken_back():
    model = converted()
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(PROMPT, past_key_values=cache)
    with pytest.raises(AttngapError, match="cannot take back 2 tokens, it remembers 0"):
        cache.crop(-2)


def test_a_filled_cache_holds_what_a_real_one_would():
    """Sliding windows hold their window, states their state: the receipt counts no cache that does not exist."""
    from tests.zoo_architectures import architectures

    for name in ("gemma3_text", "qwen3_next", "falcon_h1"):
        model = next(each for each in architectures("causal") if each.name == name).build()
        real, pretended = DynamicCache(config=model.config), DynamicCache(config=model.config)
        with torch.no_grad():
            model(torch.ones(1, 40, dtype=torch.long), past_key_values=real, use_cache=True)
            model(torch.ones(1, 12, dtype=torch.long), past_key_values=pretended, use_cache=True)
        fill(pretended, 40, torch.Generator().manual_seed(0))
        assert cache_bytes(pretended) == cache_bytes(real), name
        assert tokens_in(pretended) == tokens_in(real) == 40
