"""Every private or internal name of transformers that is used here, and the versions they were tried with.

Other modules import these names from here, so that a new release of transformers is looked at in one file.
"""

import warnings
from importlib.metadata import version
from typing import Any

import torch

from attngap.errors import AttngapError

# From the first to below the second. Only 5.23 and 2.13 have been run; of the first some names were looked up, not run.
SUPPORTED = {"transformers": ("5.16", "6"), "torch": ("2.6", "3")}
# Attributes of transformers' classes that carry no promise; a test looks each of them up.
PRIVATE = ("_attn_implementation_internal", "_can_set_attn_implementation", "_supports_sdpa")


def check_versions(installed: dict[str, str] | None = None) -> None:
    """A line when a library is older than the range, a warning when it is newer."""
    for name, (least, beyond) in SUPPORTED.items():
        found = (installed or {}).get(name) or version(name)
        wanted = f"attngap works with {name} from {least} to below {beyond}, found {found}"
        if _number(found) < _number(least):
            raise AttngapError(f"{wanted}. Run: pip install '{name}>={least},<{beyond}'")
        if _number(found) >= _number(beyond):
            warnings.warn(f"{wanted}, which has not been tried", stacklevel=2)


def _number(text: str) -> tuple[int, ...]:
    parts = text.split("+")[0].split(".")[:2]
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in (*parts, "0")[:2])


check_versions()
try:
    from transformers import PretrainedConfig, PreTrainedModel
    from transformers.cache_utils import (
        Cache,
        CacheLayerMixin,
        DynamicCache,
        DynamicLayer,
        DynamicSlidingWindowLayer,
        EncoderDecoderCache,
        LinearAttentionAndFullAttentionLayer,
        LinearAttentionCacheLayerMixin,
        LinearAttentionLayer,
    )
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask
except ImportError as error:
    raise AttngapError(
        f"transformers {version('transformers')} lacks a name that attngap needs ({error}). "
        f"Run: pip install 'transformers>={SUPPORTED['transformers'][0]},<{SUPPORTED['transformers'][1]}'"
    ) from error

__all__ = [
    "Cache",
    "CacheLayerMixin",
    "DynamicCache",
    "DynamicLayer",
    "DynamicSlidingWindowLayer",
    "EncoderDecoderCache",
    "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionCacheLayerMixin",
    "LinearAttentionLayer",
    "sdpa_attention_forward",
    "sdpa_mask",
]


def attention_of(config: PretrainedConfig) -> str | None:
    """The name of the attention function that modules with this config call."""
    return config._attn_implementation_internal


def set_attention(config: PretrainedConfig, name: str | None) -> None:
    """Of this config alone: the public setter would change its sub-configs as well."""
    config._attn_implementation_internal = name


def uses_interface(model: PreTrainedModel) -> bool:
    """Does the class look its attention function up at every call?"""
    return model._can_set_attn_implementation()


def computes_by_sdpa(model: PreTrainedModel) -> bool:
    """Is scaled dot-product attention, with a mask or a bias, all that the class does?"""
    return model._supports_sdpa


def sub_configs(config: PretrainedConfig) -> dict[str, Any]:
    """The configs inside a config, by attribute."""
    return {key: getattr(config, key) for key in config.sub_configs if getattr(config, key, None) is not None}


def own_cache(cache: Any) -> Any:
    """The cache of self-attention: a decoder that reads an encoder has another one beside it."""
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def tokens_in(cache: Cache) -> int:
    """Tokens seen so far; layers that keep a state of their own, or nothing, do not count them."""
    counted = [layer.get_seq_length() for layer in cache.layers if isinstance(layer, CacheLayerMixin)]
    return max(counted, default=0)


def state_tensors(layer: Any) -> list[torch.Tensor]:
    """What a layer with a state of its own (Mamba, gated delta, short convolutions) holds, keys and values apart."""
    if not isinstance(layer, LinearAttentionCacheLayerMixin):
        return []
    held = [*layer.conv_states.values(), *layer.recurrent_states.values()]
    return [x for x in held if x is not None]
