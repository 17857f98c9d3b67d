"""A tiny random-weight model of every architecture that transformers builds from a small config: nothing is downloaded.

Sizes are given by the names that configs use for them; what an architecture needs beside them stands in `SPECIAL`.
"""

import dataclasses
import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch
import transformers as tf
from transformers.models.auto import modeling_auto as auto

VOCABULARY, WIDTH, HEADS, LAYERS, POSITIONS = 96, 32, 4, 2, 256
LARGEST = 130_000_000  # parameters; what cannot be made smaller is left out
KINDS = {
    "causal": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "sequence to sequence": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "image": auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
}
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": POSITIONS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "initializer_range": 0.3,  # large, so that attention is far from uniform
    "init_std": 0.3,
} | {
    name: size
    for names, size in (
        (("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_size", "word_embed_proj_dim"), WIDTH),
        (("dim", "embed_dim", "input_embedding_size", "word_embedding_dim", "num_buckets"), WIDTH),
        (("intermediate_size", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_hidden_size"), 48),
        (
            ("n_inner", "hidden_dim", "shared_intermediate_size", "expert_ffn_hidden_size", "dff", "feed_forward_size"),
            48,
        ),
        (("moe_intermediate_size", "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"), 16),
        (("expert_intermediate_size", "expert_dim", "moe_ffn_hidden_size", "block_ff_dim"), 16),
        (("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers"), LAYERS),
        (("num_encoder_layers", "num_decoder_layers", "num_hidden_groups"), LAYERS),
        (("num_attention_heads", "num_heads", "n_head", "n_heads", "encoder_attention_heads"), HEADS),
        (("decoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads"), HEADS),
        (("linear_num_value_heads", "mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "lightning_num_heads"), HEADS),
        (("num_key_value_heads", "num_kv_heads", "n_head_kv", "linear_num_key_heads", "multi_query_group_num"), 2),
        (("head_dim", "d_kv", "attention_head_dim", "attention_head_size", "kv_channels", "v_head_dim"), 8),
        (("linear_key_head_dim", "linear_value_head_dim", "mamba_d_state", "ssm_state_size", "state_size"), 8),
        (("qk_nope_head_dim", "index_head_dim", "lightning_head_dim", "embed_hidden_size"), 8),
        (("qk_rope_head_dim",), 4),
        (("kv_lora_rank", "q_lora_rank", "mamba_dt_rank", "time_step_rank"), 16),
        (("mamba_d_head", "mamba_head_dim", "mamba_headdim"), 16),
        (("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "zero_expert_num"), 4),
        (("num_experts_per_tok", "moe_topk", "moe_top_k", "moe_k", "top_k_experts", "expert_num"), 2),
        (("num_experts_per_token", "num_selected_experts"), 2),
        (("n_group", "topk_group", "n_shared_experts", "num_shared_experts", "first_k_dense_replace"), 1),
        (("n_groups", "mamba_n_groups", "mamba_ngroups"), 1),
        (("n_positions", "n_ctx", "max_seq_len", "max_target_positions", "max_source_positions"), POSITIONS),
        (("max_2d_position_embeddings",), 64),
        (("image_size",), 16),
        (("patch_size",), 4),
        (("num_labels",), 5),
        (("entity_vocab_size",), 16),
        (("num_mel_bins",), 8),
        (("index_topk", "index_n_heads"), 2),
        (("vocab_size_per_layer_input",), VOCABULARY),
        (("hidden_size_per_layer_input",), 16),
        (("laurel_rank",), 4),
        (("chunk_size", "mamba_chunk_size"), 8),
    )
    for name in names
}
SHARING = {"num_hidden_layers": 6, "num_kv_shared_layers": 2, "sliding_window": 8}
SHARING |= {"layer_types": ["sliding_attention", "full_attention"] * 3}
ROTARY = {"rope_type": "default", "rope_theta": 1e4}
ALL_KEYS = {"num_key_value_heads": HEADS}
ASSISTANT = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_kv_shared_layers": LAYERS}
ASSISTANT |= {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8, "global_head_dim": 8}
ASSISTANT |= {"use_double_wide_mlp": False, "enable_moe_block": False}
STAGES = {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 2, "pretrained_window_sizes": [0, 0]}
# Beside sizes: what an architecture needs so that two layers show what it is.
SPECIAL: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            kind: ROTARY | {"mrope_section": [2, 1, 1]}
            for kind in ("sliding_attention", "full_attention")
        },
    },
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0}, "rope_parameters": ROTARY},
    "donut_swin": STAGES,
    "gemma4_assistant": {"text_config": ASSISTANT | {"class": tf.Gemma4TextConfig}, "backbone_hidden_size": WIDTH},
    "gemma4_unified_assistant": {
        "text_config": ASSISTANT | {"class": tf.Gemma4UnifiedTextConfig},
        "backbone_hidden_size": WIDTH,
    },
    "nemo_speechlm": {
        "audio_config": {
            "asr_config": ALL_KEYS,
            "diarization_config": {"head_config": {"audio_hidden_size": WIDTH}, "audio_config": ALL_KEYS},
        },
        "word_timestamp_config": ALL_KEYS | {"blank_token_id": 3},
    },
    "perceiver": {
        **{"num_latents": 8, "d_latents": WIDTH, "d_model": WIDTH, "num_blocks": 1, "num_self_attends_per_block": 1},
        **{"num_self_attention_heads": HEADS, "num_cross_attention_heads": 1},
    },
    "qwen2_vl": {"text_config": {"rope_parameters": ROTARY | {"mrope_section": [2, 1, 1]}}},
    "qwen4_exp": {
        **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8},
        **{"indexer_compress_ratio": 4},
    },
    "swin": STAGES,
    "swinv2": STAGES,
    "vibevoice_asr": {
        name: {"hidden_size": 8, "num_filters": 4, "downsampling_ratios": (2, 2), "depths": (1, 1, 1)}
        for name in ("acoustic_tokenizer_encoder_config", "semantic_tokenizer_encoder_config")
    },
    "dots3_note": {"num_key_value_heads": HEADS},
    "esmc": {"num_key_value_heads": HEADS},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": HEADS, "mamba_d_head": 16},
    "gemma3n_text": SHARING,
    "gemma4_text": SHARING | {"global_head_dim": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "bamba": {"attn_layer_indices": [1]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "llama4": {"layer_types": ["chunked_attention", "full_attention"], "attention_chunk_size": 8},
    "mamba2": {"num_heads": HEADS, "head_dim": 16},
    "mistral": {"sliding_window": None},
    "ministral": {"layer_types": ["sliding_attention", "full_attention"]},
    "neomme": {"head_dim": 16},
    "roc_bert": {"pronunciation_vocab_size": 16, "shape_vocab_size": 16},
    "reformer": {"axial_pos_embds_dim": (8, 24), "axial_pos_shape": (16, 16), "attn_layers": ["local", "lsh"]},
    "zamba": {"layers_block_type": ["mamba", "hybrid"] * 2, "num_hidden_layers": 4},  # two share their weights
    "zamba2": {"layers_block_type": ["mamba", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
ATTENDING = ("full_attention", "hybrid", "indexed_attention")


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A model class by the name of its config, and the family of heads it belongs to."""

    name: str  # model_type
    kind: str
    class_name: str

    def config(self) -> Any:
        found = small_config(getattr(tf, self.class_name).config_class, SPECIAL.get(self.name, {}))
        if self.kind == "causal" and hasattr(found, "is_decoder"):
            found.is_decoder = True
        return found

    def build(self) -> tf.PreTrainedModel:
        """Weights from a seed; the error of transformers where a small config does not make a model."""
        torch.manual_seed(0)
        cls, config = getattr(tf, self.class_name), self.config()
        with torch.device("meta"):
            size = sum(p.numel() for p in cls(config).parameters())
        if size > LARGEST:
            raise ValueError(f"{size} parameters")
        model = cls(config).eval()
        with torch.no_grad():
            for weight in model.parameters():
                if weight.is_floating_point() and weight.numel() > 1 and weight.min() == weight.max():
                    weight.add_(0.1 * torch.randn_like(weight))  # what starts constant may hide what it does
        return model


def small_config(cls: Any, special: dict[str, Any]) -> Any:
    """The config with every size that it has made small; sub-configs likewise."""
    kinds = (tf.PretrainedConfig, tf.AutoConfig)
    inner = {key: part for key, part in (cls.sub_configs or {}).items() if issubclass(part, kinds)}
    default = _default(cls)
    names = set(inspect.signature(cls).parameters)
    stages = {name for name in names if isinstance(default.get(name), list | tuple)}  # a size per stage
    stages |= {name for name, other in cls.attribute_map.items() if other in stages}
    known = {name for name in SIZES if name in names or name in cls.attribute_map} - stages
    chosen = {name: SIZES[name] for name in known}
    if "kv_lora_rank" in names and "num_key_value_heads" in names:
        chosen["num_key_value_heads"] = HEADS  # latent keys are expanded to all heads
    for key, part in inner.items():
        more = dict(special.get(key, {}))
        kind = more.pop("class", type(default.get(key)) if part is tf.AutoConfig else part)
        if issubclass(kind, tf.PretrainedConfig):
            chosen[key] = small_config(kind, more)
    given = chosen | {name: value for name, value in special.items() if name not in inner}
    if "layer_types" in names and "layer_types" not in special:
        given |= _two_kinds(cls)
    return cls(**given)


def _default(cls: Any) -> dict[str, Any]:
    try:
        return vars(cls())
    except Exception:  # of transformers: some configs need to be told their parts
        return {}


def _two_kinds(cls: Any) -> dict[str, Any]:
    """Two layers of different kinds, the second one with heads that read everything, where the default has both."""
    try:
        default = cls()
    except (ValueError, TypeError, KeyError):
        return {}
    kinds = list(dict.fromkeys(getattr(default, "layer_types", None) or ()))
    full = [kind for kind in kinds if kind in ATTENDING]
    found: dict[str, Any] = {"sliding_window": 8} if "sliding_attention" in kinds or "hybrid_sliding" in kinds else {}
    if len(kinds) > 1 and full:
        found["layer_types"] = [next(kind for kind in kinds if kind != full[0]), full[0]]
    return found


def architectures(*kinds: str) -> Iterator[Architecture]:
    """All of the given kinds, each class once."""
    for kind in kinds or KINDS:
        seen = set()
        for name, classes in KINDS[kind].items():
            for class_name in (classes,) if isinstance(classes, str) else classes:
                if class_name not in seen and hasattr(tf, class_name):
                    seen.add(class_name)
                    yield Architecture(re.sub("-", "_", name), kind, class_name)
