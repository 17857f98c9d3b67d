"""A model's twin, which shares the original's weights until it is trained, cast or moved; and the way back."""

import copy
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attngap.errors import AttngapError
from attngap.models.products import plain_products

PIECE = 2048  # tokens of a prompt that are read at a time: what a layer computes of them stays in a processor's cache
CHILD = "attngap"  # the child of an attention module that says which heads are replaced


class Converted:
    """What a converted model does otherwise than its class: it keeps its conversion, and the original its weights."""

    def train(self, mode: bool = True) -> Any:
        """Training writes into the weights, so the twin gets its own the first time."""
        if mode and vars(self).get("shares_weights"):
            _own_weights(self)  # pyright: ignore[reportArgumentType]
        return super().train(mode)  # pyright: ignore[reportAttributeAccessIssue]

    def generate(self, *args: Any, **options: Any) -> Any:
        """A long prompt is read in pieces, unless another `prefill_chunk_size` is given.

        Decoding that proposes tokens and withdraws some needs a cache that was told so before the first of them.
        """
        from attngap.models.swap import empty_cache

        config: Any = options.get("generation_config") or (args[1] if len(args) > 1 else None)
        config = config or self.generation_config  # pyright: ignore[reportAttributeAccessIssue]
        lookup = options.get("prompt_lookup_num_tokens", config.prompt_lookup_num_tokens)
        withdraws = lookup or config.is_assistant or options.get("assistant_model") is not None
        if withdraws and options.get("past_key_values") is None:
            options["past_key_values"] = empty_cache(self)  # pyright: ignore[reportArgumentType]
            options["past_key_values"].activate_past_recording()
        # An encoder's mask would be cut where a decoder's prompt is.
        whole = withdraws or self.config.is_encoder_decoder  # pyright: ignore[reportAttributeAccessIssue]
        if not whole and _reads_in_pieces(args, options, config):
            options["prefill_chunk_size"] = PIECE
        return super().generate(*args, **options)  # pyright: ignore[reportAttributeAccessIssue]

    def save_pretrained(self, save_directory: Any, *args: Any, **options: Any) -> None:
        """What `attngap.save` writes: transformers alone would write the softmax model."""
        from attngap.models.save import save

        unknown = set(options) - {"state_dict", "is_main_process", "safe_serialization", "max_shard_size", "token"}
        if args or options.pop("push_to_hub", False) or unknown - {"push_to_hub"}:
            asked = ", ".join(sorted(unknown)) or "these arguments"
            raise AttngapError(f"A converted model is saved without {asked}. Use attngap.save(model, directory)")
        if options.get("is_main_process", True):
            save(self, Path(save_directory))  # pyright: ignore[reportArgumentType]

    def set_attn_implementation(self, attn_implementation: Any, *_: Any, **__: Any) -> None:
        if attn_implementation != CHILD:
            raise AttngapError(
                f"This model was converted by attngap, and attn_implementation={attn_implementation!r} would undo "
                "that. Load the original for another attention"
            )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """The class is made on the fly, so pickles and copies name the class it was made from."""
        return _revive, (plain_class(self),), vars(self)


def _reads_in_pieces(args: tuple[Any, ...], options: Mapping[str, Any], config: Any) -> bool:
    """A prompt of more than one piece, of tokens and nothing beside them that would have to be cut too."""
    tokens = options.get("input_ids", options.get("inputs", args[0] if args else None))
    given = {name for name, x in options.items() if isinstance(x, Tensor)} - {"input_ids", "inputs", "attention_mask"}
    if not isinstance(tokens, Tensor) or tokens.ndim != 2 or tokens.shape[1] <= PIECE or given:
        return False
    chosen = options.get("prefill_chunk_size", config.prefill_chunk_size)
    return chosen is None and bool(options.get("use_cache", config.use_cache is not False))


@functools.cache
def converted_class(kind: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """The class with a converted model's ways, under its own name."""
    return type(kind.__name__, (Converted, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})


def plain_class(model: Any) -> type[PreTrainedModel]:
    """The class of transformers that a model is of, converted or not."""
    return type(model).__mro__[2] if isinstance(model, Converted) else type(model)


def _revive(kind: type[PreTrainedModel]) -> PreTrainedModel:
    return object.__new__(converted_class(kind))


def twin(model: PreTrainedModel) -> PreTrainedModel:
    """A copy with modules, configs and parameters of its own, whose numbers are the original's in the same memory."""
    shared: dict[int, Any] = {id(x): x for x in model.buffers()}
    for x in model.parameters():
        # Other kinds, such as quantized ones, know more than their numbers.
        shared[id(x)] = nn.Parameter(x.detach(), x.requires_grad) if type(x) is nn.Parameter else x
    return copy.deepcopy(model, shared)


def _own_weights(model: PreTrainedModel) -> None:
    with torch.no_grad():
        for x in (*model.parameters(), *model.buffers()):
            x.data = x.data.clone()
    vars(model)["shares_weights"] = False


def undone(model: PreTrainedModel) -> PreTrainedModel:
    """The softmax model inside a converted one, without its replacements and LoRA, sharing its weights."""
    found = twin(model)
    found.__class__ = plain_class(model)
    for name in ("conversion", "shares_weights"):
        vars(found).pop(name, None)
    plain_products(found)
    for part in list(found.modules()):
        part._modules.pop(CHILD, None)
        for name, child in list(part.named_children()):
            inner = getattr(child, "base_layer", None)  # what peft's LoRA layers wrap
            if type(child).__module__.startswith("peft.") and isinstance(inner, nn.Module):
                setattr(part, name, inner)
    return found
