"""Small models for the tests of the comparison."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from attngap.heads.replacement import build_replacement
from attngap.models.plan import Replacement
from attngap.models.positions import layer_positions
from attngap.models.shapes import layer_shapes


def llama(layers: int = 2) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, num_hidden_layers=layers, vocab_size=50, max_position_embeddings=256)
    return LlamaForCausalLM(config).eval()


def sharp(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Heads that look at few keys and whose output counts, as in a trained model."""
    with torch.no_grad():
        for layer in model.model.layers:
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                getattr(layer.self_attn, name).weight.mul_(12)
    return model


def tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 50, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def featured(model, window: int):
    """Replacements with features that were not fitted: enough to see whether states are the right ones."""
    planned, where = Replacement(feature_map="hedgehog", features=None, window=window, sinks=2), layer_positions(model)
    return {
        shape.layer: build_replacement(shape, planned, positions=where[shape.layer])[0] for shape in layer_shapes(model)
    }
