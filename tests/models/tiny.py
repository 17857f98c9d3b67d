"""Random-weights models of several architectures, small enough to convert in milliseconds."""

import torch
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from attngap import mechanism
from attngap.mechanisms.base import Mechanism
from attngap.models.swap import layer_shapes

VOCABULARY = 64
SHARED = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
GROUPED = SHARED | {"num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "eos_token_id": None}
# Larger than the default weights, so that attention is far from uniform and greedy choices far from ties.
SPREAD = {"initializer_range": 0.3}

DECODERS = {
    "llama": (LlamaForCausalLM, LlamaConfig(**GROUPED, **SPREAD)),
    "mistral": (MistralForCausalLM, MistralConfig(**GROUPED, **SPREAD, sliding_window=None)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**GROUPED, **SPREAD)),
    "gpt2": (
        GPT2LMHeadModel,
        GPT2Config(
            vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=512, initializer_range=0.3,
            bos_token_id=None, eos_token_id=None, pad_token_id=0,
        ),
    ),
}  # fmt: skip
ENCODERS = {"bert": (BertModel, BertConfig(**SHARED, **SPREAD, pad_token_id=0))}


def tiny(name: str = "llama") -> PreTrainedModel:
    torch.manual_seed(0)
    build, config = (DECODERS | ENCODERS)[name]
    return build(config).eval()


def mechanisms(model: PreTrainedModel, name: str = "hybrid", **options) -> dict[int, Mechanism]:
    """One mechanism a layer, randomly perturbed so that no two heads are alike."""
    if name == "hybrid":
        options = {"feature_map": "prototype", "window": 5, "sinks": 2, "relative": False, "gain": "query"} | options
    found = {}
    for shape in layer_shapes(model):
        new = mechanism(
            name, shape.heads, shape.dim, shape.value_dim, kv_heads=shape.kv_heads,
            **({"causal": False} if not shape.causal else {}), **options,
        )  # fmt: skip
        with torch.no_grad():
            for weight in new.parameters():
                weight.add_(0.3 * torch.randn_like(weight))
        found[shape.layer] = new
    return found
