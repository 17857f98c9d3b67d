"""What a replacement of each attention call of a model must fit, and why some calls cannot be replaced."""

import dataclasses
import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attngap.errors import AttngapError
from attngap.models.capture import Call, allowed, capture
from attngap.models.compat import (
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    own_cache,
)
from attngap.models.mode import evaluating, tokens_suffice
from attngap.models.placement import device_of, has_weights_elsewhere
from attngap.models.twin import CHILD


@dataclasses.dataclass(frozen=True)
class LayerShape:
    """What a replacement of one attention call must fit."""

    layer: int
    module: str  # name of the attention module inside the model
    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    scale: float
    causal: bool
    obstacle: str | None  # why its heads cannot be replaced
    cache: int | None = None  # its place in the model's cache; None without one
    device: torch.device | None = None  # of its queries


def layer_shapes(model: PreTrainedModel) -> list[LayerShape]:
    """Every self-attention call of the model, in order, found by running two tokens through it."""
    calls: list[Call] = []
    with torch.no_grad(), evaluating(model), capture(model, lambda call: None if call.cross else calls.append(call)):
        cache = own_cache(getattr(_two_tokens(model), "past_key_values", None))
    if not calls:
        raise AttngapError(
            f"{type(model).__name__} has no softmax attention: there is no head to look at or to replace"
        )
    names = {id(module): name for name, module in model.named_modules()}
    holders = [_holder(x.k if x.source is None else x.source) for x in calls]
    modules = [id(x.module) for x in calls]
    return [
        _shape(
            call,
            names[id(call.module)],
            cache,
            shared=holders.count(holder) > 1,
            repeated=modules.count(id(call.module)) > 1,
        )
        for call, holder in zip(calls, holders, strict=True)
    ]


def _holder(keys: Tensor) -> int:
    """Whose memory they are; on the meta device no memory has an address, but each is an object."""
    memory = keys.untyped_storage()
    return memory._cdata if keys.is_meta else memory.data_ptr()


def _two_tokens(model: PreTrainedModel) -> Any:
    parameters = inspect.signature(model.forward).parameters
    if "input_ids" not in parameters:
        raise AttngapError(
            f"{type(model).__name__} takes {next(iter(parameters), 'nothing')} and no tokens. Only models that read "
            "text are supported"
        )
    place = device_of(model) if has_weights_elsewhere(model) else model.device  # meta, where sizes alone are asked for
    tokens = torch.ones(1, 2, dtype=torch.long, device=place)
    extra = {"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {}
    # Not said where a config turns it off: an encoder has no cache to use.
    cached = {"use_cache": True} if getattr(model.config.get_text_config(), "use_cache", False) else {}
    with tokens_suffice(model):
        return model(input_ids=tokens, **extra, **(cached if _takes(model, "use_cache") else {}))


def _takes(model: nn.Module, name: str) -> bool:
    parameters = inspect.signature(model.forward).parameters
    return name in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def _shape(call: Call, name: str, cache: Any, *, shared: bool, repeated: bool) -> LayerShape:
    causal = call.causal
    if call.mask is not None and (may := allowed(call, slice(0, 2))) is not None:
        causal = not bool(may[0, 0, 0, 1])
    index: Any = getattr(call.module, "layer_idx", None) if causal and cache is not None else None
    return LayerShape(
        layer=call.layer,
        module=name,
        heads=call.heads,
        kv_heads=call.kv_heads,
        dim=call.q.shape[-1],
        value_dim=call.v.shape[-1],
        scale=call.scale,
        causal=causal,
        obstacle=_obstacle(call, cache, index, causal=causal, shared=shared, repeated=repeated),
        cache=index,
        device=call.q.device,
    )


def _obstacle(call: Call, cache: Any, index: Any, *, causal: bool, shared: bool, repeated: bool) -> str | None:
    """Why the heads of a call cannot be replaced, in words that fit behind "Layer 3 cannot be replaced: "."""
    if call.module._modules.get(CHILD) is not None:
        return "it was replaced by an earlier conversion; convert the original model instead"
    if call.window is not None:
        return f"it has a sliding window of {call.window} already, so its cost is bounded"
    if call.bias is not None:
        return "its logits carry a learned position bias, which no replacement here reproduces"
    if repeated:
        return "its attention module is called more than once in a forward pass"
    if shared:
        return "it shares its keys and values with another layer"
    if not causal or cache is None:
        return None
    if type(cache) is not DynamicCache:
        return f"its model keeps a cache of its own kind, {type(cache).__name__}"
    if index is None or index >= len(cache.layers):
        return "its module does not say which layer of the cache is its own"
    held = cache.layers[index]
    if isinstance(held, DynamicSlidingWindowLayer):
        return f"it reads in windows or chunks of {held.sliding_window} already, so its cost is bounded"
    if type(held) not in (DynamicLayer, LinearAttentionAndFullAttentionLayer):
        return f"its layer of the cache is of another kind, {type(held).__name__}"
    return None if held.get_seq_length() else "its module does not fill the cache before it attends"


def check_replaceable(model: PreTrainedModel, shapes: Iterable[LayerShape]) -> None:
    """Refuse, before anything is fitted, a model none of whose layers can be replaced."""
    if model.config.is_encoder_decoder:
        raise AttngapError(
            f"{type(model).__name__} is an encoder with a decoder; these are diagnosed but not converted. Give one "
            "that is either"
        )
    obstacles = [shape.obstacle for shape in shapes]
    if all(obstacles):
        why = "; ".join(dict.fromkeys(each or "" for each in obstacles))
        raise AttngapError(f"No layer of this {type(model).__name__} can be replaced: {why}")
