"""Positions are found on the model itself, and what is turned back does not know them."""

from typing import Any

import pytest
import torch
import transformers as tf

from attngap.mechanisms.rotary import Rotary
from attngap.models.capture import capture
from attngap.models.positions import layer_positions
from attngap.models.swap import swap
from tests.zoo import GROUPED, SHARED, SPREAD, VOCABULARY, mechanisms, tiny

GROUP: dict[str, Any] = GROUPED | SPREAD
THETA = {"rope_theta": 10000.0}
SCALED = {
    "plain": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


def llama(kind: str) -> tf.PreTrainedModel:
    return tf.LlamaForCausalLM(tf.LlamaConfig(**GROUP, rope_parameters=THETA | SCALED[kind]))


def build(name: str) -> tf.PreTrainedModel:
    torch.manual_seed(0)
    if name in SCALED:
        return llama(name).eval()
    partial = THETA | {"rope_type": "default", "partial_rotary_factor": 0.5}
    many: dict[str, Any] = SHARED | SPREAD | {"pad_token_id": 0, "eos_token_id": None}
    models = {
        "partial": lambda: tf.GPTNeoXForCausalLM(tf.GPTNeoXConfig(**many, rope_parameters=partial)),
        "adjacent": lambda: tf.CohereForCausalLM(
            tf.CohereConfig(**GROUP | {"bos_token_id": None}, rope_parameters=THETA)
        ),
        "partial and adjacent": lambda: tf.GlmForCausalLM(
            tf.GlmConfig(**GROUP | {"bos_token_id": None}, rope_parameters=partial)
        ),
    }
    return models[name]().eval()


ROTARY = (*SCALED, "partial", "adjacent", "partial and adjacent")


@pytest.mark.parametrize("name", ROTARY)
def test_a_turned_back_key_of_the_first_layer_depends_on_its_token_alone(name):
    model = build(name)
    positions = layer_positions(model)
    assert all(each.known and each.rotary is not None for each in positions)
    layout = positions[0].rotary
    assert layout is not None
    found = []

    def look(call):
        if call.layer == 0:
            assert call.rotary is not None
            found.append((call.k, layout.unrotate(call.k, call.rotary), layout.unrotate(call.q, call.rotary)))

    tokens = torch.randint(5, VOCABULARY, (1, 90))
    tokens[0, [3, 40, 88]] = 7
    with torch.no_grad(), capture(model, look):
        model(input_ids=tokens)
    turned, k, q = (x[0, :, [3, 40, 88]] for x in found[0])
    assert (turned - turned[:, :1]).abs().max() > 0.1  # as the model has them they differ
    for x in (k, q):
        torch.testing.assert_close(x, x[:, :1].expand_as(x), atol=2e-5, rtol=1e-4)


def test_turning_back_undoes_turning():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 10, 16, generator=generator)
    angle = torch.randn(1, 10, 4, generator=generator) * 9
    for layout, both in ((Rotary(), (angle, angle)), (Rotary("adjacent", "once", "last"), (angle,))):
        wide = torch.cat(both, -1)
        angles = (1.3 * wide.cos(), 1.3 * wide.sin())  # scaled, as yarn has them
        torch.testing.assert_close(layout.unrotate(layout.rotate(x, angles), angles), x, atol=1e-5, rtol=1e-4)


def test_learned_positions_are_not_known_and_a_model_without_any_needs_no_turning():
    assert not any(each.known for each in layer_positions(tiny("gpt2")))
    torch.manual_seed(0)
    config = tf.SmolLM3Config(**GROUP, no_rope_layers=[1, 0], bos_token_id=None)
    rotary, without = layer_positions(tf.SmolLM3ForCausalLM(config).eval())
    assert rotary.rotary is not None
    assert without.known
    assert without.rotary is None


@pytest.mark.parametrize("name", ["plain", "dynamic", "partial and adjacent"])
def test_a_converted_model_reads_padded_plain_and_single_tokens_alike(name):
    model = build(name)
    options = [each.options() for each in layer_positions(model)]
    parts = mechanisms(model, map_options={"decay": True}, rotary=options[0]["rotary"])
    converted = swap(model, {layer: (part, [0]) for layer, part in parts.items()})
    tokens = torch.randint(5, VOCABULARY, (1, 60), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        plain = converted(input_ids=tokens, use_cache=False).logits
        padding = torch.zeros(1, 9, dtype=torch.long)
        seen = torch.cat((padding, torch.ones_like(tokens)), 1)
        place = (seen.cumsum(1) - 1).clamp(min=0)
        left = converted(
            input_ids=torch.cat((padding, tokens), 1), attention_mask=seen, position_ids=place, use_cache=False
        ).logits
        right = converted(
            input_ids=torch.cat((tokens, padding), 1), attention_mask=seen.flip(1), use_cache=False
        ).logits
        cache, single = tf.DynamicCache(config=model.config), []
        for token in tokens.split(1, 1):
            single.append(converted(input_ids=token, past_key_values=cache, use_cache=True).logits)
    torch.testing.assert_close(left[:, 9:], plain, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(right[:, :60], plain, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(torch.cat(single, 1), plain, atol=1e-4, rtol=1e-3)
