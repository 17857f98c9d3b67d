"""Sizes from a config alone are those of the model, also of models that nobody could load here."""

import pytest
import torch
from transformers import BertConfig, LlamaConfig

from attngap.costs.shape import shape_of
from attngap.errors import AttngapError
from tests import zoo

# As Meta published them; the numbers of parameters are those of the model cards.
LLAMA = {"vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5}
EIGHT = LlamaConfig(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, **LLAMA)
SEVENTY = LlamaConfig(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, **LLAMA)


@pytest.mark.parametrize(("config", "parameters"), [(EIGHT, 8_030_261_248), (SEVENTY, 70_553_706_496)])
def test_large_models_have_the_parameters_that_were_published(config, parameters):
    found = shape_of(config)
    assert found.parameters == parameters
    assert found.replaceable == found.layers == config.num_hidden_layers
    assert (found.group, found.dim, found.hidden) == (config.num_attention_heads // 8, 128, config.hidden_size)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "gpt2", "sliding"])
def test_small_ones_are_what_they_are(family):
    kind, config = zoo.FAMILIES[family]
    model, found = kind(config), shape_of(config)
    assert found.parameters == sum(p.numel() for p in model.parameters())
    assert found.head_parameters == model.get_output_embeddings().weight.numel()
    layer = (model.model.layers if hasattr(model, "model") else model.transformer.h)[0]
    beside = found.parameters - found.layers * sum(p.numel() for p in layer.parameters())
    assert 0 <= found.layers * found.layer_parameters - (found.parameters - beside) <= beside
    assert found.replaceable == (0 if family == "sliding" else 2)
    assert not any(p.is_meta for p in model.parameters())
    assert torch.empty(1).device.type == "cpu"


def test_an_encoder_is_refused_in_a_line():
    with pytest.raises(AttngapError, match="estimate knows decoders that write text; BertModel is another kind"):
        shape_of(BertConfig(**zoo.SHARED, architectures=["BertModel"]))
