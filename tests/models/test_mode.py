"""Looking at a model leaves its mode as it was, and what cannot be looked at is told in a line."""

import pytest
import torch
import transformers as tf

import attngap
from attngap.errors import AttngapError
from attngap.heads.passages import check_tokenizer, longest
from attngap.models.mode import evaluating
from attngap.models.shapes import layer_shapes
from tests import zoo
from tests.conversion.small import TEXT
from tests.zoo import SHARED, tiny, tokenizer


def test_training_mode_is_off_inside_and_as_it_was_after():
    model = tiny().train()
    model.lm_head.eval()
    with evaluating(model):
        assert not any(part.training for part in model.modules())
    assert model.training
    assert not model.lm_head.training


def test_dropout_does_not_change_a_diagnosis():
    model = tiny("gpt2").train()

    def diagnosed():
        return [head.entropy for head in attngap.diagnose(model, tokenizer(), TEXT, context=64, quick=True).heads]

    assert diagnosed() == diagnosed()
    assert model.training


def test_positions_behind_an_offset_are_not_counted():
    model = tf.RobertaModel(tf.RobertaConfig(**SHARED | {"max_position_embeddings": 66}, pad_token_id=1)).eval()
    assert longest(model) == 64
    model(torch.full((1, 64), 5))
    assert longest(tiny()) == 512


def test_a_tokenizer_of_another_model_is_refused():
    with pytest.raises(AttngapError, match=r"The tokenizer has \d+ tokens and the model embeds 64"):
        check_tokenizer(tf.LlamaForCausalLM(tf.LlamaConfig(**SHARED | {"vocab_size": 64})), zoo.tokenizer())


def test_a_model_that_needs_more_than_tokens_is_told_so():
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    vision = sizes | {"image_size": 8, "patch_size": 4}
    model = tf.CLIPModel(tf.CLIPConfig(text_config=sizes | {"vocab_size": 64}, vision_config=vision)).eval()
    with pytest.raises(AttngapError, match="CLIPModel does not run on tokens alone"):
        layer_shapes(model)
    with pytest.raises(AttngapError, match=r"ViTModel takes pixel_values and no tokens"):
        layer_shapes(tf.ViTModel(tf.ViTConfig(**vision)).eval())
