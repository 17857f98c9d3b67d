import pytest
import torch

from attngap import mechanism
from attngap.errors import AttngapError
from attngap.models.capture import capture
from attngap.models.masks import real_tokens
from attngap.models.mixed import mixed_heads
from attngap.models.shapes import layer_shapes
from attngap.models.swap import swap
from tests.zoo import DECODERS, VOCABULARY, mechanisms, tiny

TOKENS = torch.randint(VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(1))


def logits(model, tokens=TOKENS, **options):
    with torch.no_grad():
        return model(tokens, use_cache=False, **options).logits


@pytest.mark.parametrize("name", DECODERS)
def test_nothing_replaced_is_the_original_to_the_bit(name):
    model = tiny(name)
    assert torch.equal(logits(swap(model, {})), logits(model))


@pytest.mark.parametrize("name", DECODERS)
def test_every_decoder_converts_and_the_original_stays_as_it_is(name):
    model = tiny(name)
    before = logits(model)
    converted = swap(model, {layer: (m, [1]) for layer, m in mechanisms(model).items()})
    assert not torch.allclose(logits(converted), before, atol=1e-2)
    assert torch.equal(logits(model), before)
    assert not mixed_heads(model)
    assert {p.data_ptr() for p in model.parameters()} <= {p.data_ptr() for p in converted.parameters()}


@pytest.mark.parametrize(("name", "options"), [("hybrid", {}), ("hedgehog", {}), ("elu", {}), ("retention", {})])
def test_a_fully_replaced_layer_is_the_mechanisms_parallel_form(name, options):
    model = tiny()
    made = mechanisms(model, name, **options)
    seen = {}
    converted = swap(model, {0: (made[0], [])})
    for part in mixed_heads(converted).values():
        part.register_forward_hook(lambda module, args, out: seen.update(args=args[:3], out=out))
    logits(converted)
    expected = made[0].parallel(made[0].read(None, *seen["args"]))
    torch.testing.assert_close(seen["out"], expected, atol=1e-5, rtol=1e-4)


def test_kept_heads_are_softmax_and_the_others_are_the_mechanism():
    model, calls = tiny(), []
    with capture(model, calls.append):
        logits(model)
    made = mechanisms(model)[0]
    outs = []
    converted = swap(model, {0: (made, [0, 3])})
    next(iter(mixed_heads(converted).values())).register_forward_hook(lambda m, args, out: outs.append(out))
    logits(converted)
    replaced, _ = made(None, calls[0].q, calls[0].k, calls[0].v)
    torch.testing.assert_close(outs[0][:, [0, 3]], calls[0].output[:, [0, 3]], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(outs[0][:, [1, 2]], replaced[:, [1, 2]])


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing_for_real_tokens(side):
    model = tiny()
    converted = swap(model, {layer: (m, [2]) for layer, m in mechanisms(model).items()})
    short = TOKENS[:1, :30]
    filler = torch.zeros(1, 7, dtype=torch.long)
    padded = torch.cat((filler, short) if side == "left" else (short, filler), 1)
    mask = torch.cat((filler, torch.ones_like(short)) if side == "left" else (torch.ones_like(short), filler), 1)
    position = (mask.cumsum(1) - 1).clamp(min=0)
    found = logits(converted, padded, attention_mask=mask, position_ids=position)[mask.bool()]
    torch.testing.assert_close(found, logits(converted, short)[0], atol=1e-4, rtol=1e-4)


def test_an_encoder_converts_and_ignores_padding():
    model = tiny("bert")
    made = mechanisms(model, "prototype")
    converted = swap(model, {layer: (m, [1]) for layer, m in made.items()})
    padded = torch.cat((TOKENS, torch.zeros(2, 5, dtype=torch.long)), 1)
    mask = torch.cat((torch.ones_like(TOKENS), torch.zeros(2, 5, dtype=torch.long)), 1)
    with torch.no_grad():
        alone = converted(TOKENS).last_hidden_state
        found = converted(padded, attention_mask=mask).last_hidden_state[:, :40]
        original = model(TOKENS).last_hidden_state
    torch.testing.assert_close(found, alone, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(original, alone, atol=1e-2)


def test_a_mask_that_is_more_than_padding_is_refused():
    packed = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()
    packed[..., 3:, :3] = False
    with pytest.raises(AttngapError, match=r"causal and padding masks only.*one sequence a row"):
        real_tokens(packed, 6, causal=True)
    assert real_tokens(torch.ones(1, 1, 6, 6, dtype=torch.bool).tril(), 6, causal=True) is None


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (lambda m: {7: (m[0], [])}, r"No layer 7: the model has layers 0-1"),
        (lambda m: {0: (m[0], [4])}, r"No head 4 in layer 0: it has heads 0-3"),
        (lambda m: {0: (mechanism("elu", 4, 8), [])}, r"Layer 0 needs a mechanism with kv_heads=2, got kv_heads=4"),
        (lambda m: {0: (mechanism("gla", 4, 8, kv_heads=2, model_dim=32), [])}, r"gla computes gates from the layer"),
    ],
)
def test_wrong_swaps_are_refused_and_leave_the_model_alone(layers, message):
    model = tiny()
    before = logits(model)
    with pytest.raises(AttngapError, match=message):
        swap(model, layers(mechanisms(model)))
    assert torch.equal(logits(model), before)
    assert model.config._attn_implementation == "sdpa"


def test_a_layer_with_a_sliding_window_is_refused():
    from transformers import MistralForCausalLM

    config = DECODERS["mistral"][1].from_dict(DECODERS["mistral"][1].to_dict() | {"sliding_window": 8})
    model = MistralForCausalLM(config).eval()
    with pytest.raises(AttngapError, match="Layer 0 cannot be replaced: it has a sliding window of 8 already"):
        swap(model, {0: (mechanisms(tiny())[0], [])})


def test_shapes_of_a_model():
    shape = layer_shapes(tiny())[1]
    assert (shape.layer, shape.heads, shape.kv_heads, shape.dim, shape.causal) == (1, 4, 2, 8, True)
    assert shape.module == "model.layers.1.self_attn"
    assert not layer_shapes(tiny("bert"))[0].causal
