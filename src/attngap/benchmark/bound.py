"""A model without its attention: what is left of its time is the least that any other attention could come to."""

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from attngap.errors import AttngapError
from attngap.models.capture import attention_configs
from attngap.models.compat import sdpa_mask, set_attention, uses_interface
from attngap.models.products import compile_products
from attngap.models.twin import twin

NAME = "attngap-left-out"


def nothing(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """The interface's signature: zeros, one for each number that attention would put out."""
    b, heads, t, _ = query.shape
    return value.new_zeros(b, t, heads, value.shape[-1]), None


AttentionInterface.register(NAME, nothing)
AttentionMaskInterface.register(NAME, sdpa_mask)


def without_attention(model: PreTrainedModel) -> PreTrainedModel:
    """A twin that shares the weights and computes all but attention: linear layers, norms, positions and its cache.

    Its linear layers, gated MLPs and norms are those of a converted model, which may be faster than the original's.
    """
    if not uses_interface(model):
        raise AttngapError(
            f"{type(model).__name__} computes its attention by itself, so it cannot be left out. Use a model whose "
            "attention goes through transformers' AttentionInterface"
        )
    found = twin(model)
    for config in attention_configs(found):
        set_attention(config, NAME)
    compile_products(found)
    return found
