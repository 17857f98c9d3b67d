"""Replace attention heads through transformers' attention interface: kept heads by SDPA, the others by a mechanism.

A converted model is a twin of the original: it shares the weights and differs in its attention modules, each of which
may carry a child `attngap` that says which heads are kept and holds the mechanism of the others.
"""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from attngap.errors import AttngapError
from attngap.mechanisms.base import Mechanism
from attngap.models.angles import angles_of, note_angles
from attngap.models.cache import Place, install
from attngap.models.capture import NAME as CAPTURED
from attngap.models.capture import attention_configs
from attngap.models.compat import (
    DynamicCache,
    EncoderDecoderCache,
    attention_of,
    sdpa_attention_forward,
    sdpa_mask,
    set_attention,
)
from attngap.models.mixed import MixedHeads, mixed_heads
from attngap.models.mixed_layer import forget_pending
from attngap.models.products import compile_products
from attngap.models.shapes import LayerShape, layer_shapes
from attngap.models.twin import CHILD, converted_class, twin

NAME = "attngap"
REFUSED = ("softcap", "s_aux", "position_bias", "sliding_window", "indices", "block_indices")


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """The interface's signature. A module without replaced heads computes exactly what it did before."""
    mixed = module._modules.get(CHILD)
    if not isinstance(mixed, MixedHeads):
        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        return output, None
    for name in REFUSED:
        if kwargs.get(name) is not None:
            raise AttngapError(f"{type(module).__name__} uses {name!r}, which replaced heads do not handle")
    inputs = query, key, value, attention_mask, kwargs.get("scaling"), angles_of(module)
    if query.shape[2] == 1 and not mixed._forward_hooks and (token := mixed.token(*inputs)) is not None:
        return token, None
    out = mixed(*inputs)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)


def swap(model: PreTrainedModel, layers: Mapping[int, tuple[Mechanism, Iterable[int]]]) -> PreTrainedModel:
    """A twin of the model in which layer i runs `layers[i] = (mechanism, heads that keep softmax)`.

    The original is not changed. Layers that are not mentioned stay as they are. Weights share memory with the original
    until the twin is put into training mode, cast or moved; to write into them in any other way changes both.
    """
    if mixed_heads(model):
        raise AttngapError(
            f"This {type(model).__name__} was converted already. Convert the original model: it is named in the record "
            "of the conversion"
        )
    _refuse_adapters(model)
    shapes = {shape.layer: shape for shape in layer_shapes(model)}
    for layer, (mechanism, keep) in layers.items():
        _check(layer, shapes, mechanism, keep)
    converted = twin(model)
    for layer, (mechanism, keep) in layers.items():
        module = converted.get_submodule(shapes[layer].module)
        mixed = MixedHeads(layer, mechanism, keep, shapes[layer].cache)
        module.add_module(CHILD, mixed.to(shapes[layer].device))
    converted.__class__ = converted_class(type(model))
    vars(converted)["shares_weights"] = True
    attach(converted)
    if layers:
        compile_products(converted)
    return converted


def _refuse_adapters(model: PreTrainedModel) -> None:
    for name, part in model.named_modules():
        if type(part).__module__.startswith("peft."):
            raise AttngapError(
                f"{name!r} carries an adapter of peft, which the saved model would lose. Put it into the weights "
                "first: merge_and_unload()"
            )


def attach(model: PreTrainedModel) -> None:
    """Route the model's attention through `attend`, and every empty cache it is given through mixed layers."""
    for config in attention_configs(model):
        set_attention(config, NAME)
    note_angles(part for part in model.modules() if CHILD in part._modules)
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and "past_key_values" in inspect.signature(part.forward).parameters:
            part.register_forward_pre_hook(GiveCache(part), with_kwargs=True)


def _check(layer: int, shapes: dict[int, LayerShape], mechanism: Mechanism, keep: Iterable[int]) -> None:
    if layer not in shapes:
        raise AttngapError(f"No layer {layer}: the model has layers 0-{len(shapes) - 1}")
    shape = shapes[layer]
    if shape.obstacle:
        raise AttngapError(f"Layer {layer} cannot be replaced: {shape.obstacle}. Keep all its heads")
    if mechanism.gated:
        raise AttngapError(
            f"{mechanism.name} computes gates from the layer's input, which the attention interface does not pass on. "
            "Choose a mechanism without gates: attngap mechanisms"
        )
    for label in ("heads", "kv_heads", "dim", "value_dim", "causal"):
        wanted, got = getattr(shape, label), getattr(mechanism, label)
        if wanted != got:
            raise AttngapError(f"Layer {layer} needs a mechanism with {label}={wanted}, got {label}={got}")
    for head in keep:
        if not 0 <= head < shape.heads:
            raise AttngapError(f"No head {head} in layer {layer}: it has heads 0-{shape.heads - 1}")


class GiveCache:
    """Before a forward pass: a cache where the model would make one, with mixed layers wherever heads were replaced."""

    def __init__(self, model: PreTrainedModel):
        self.names = list(inspect.signature(model.forward).parameters)  # looked up once: every token comes by here
        self.places = dict(_cache_places(model))

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
        config: Any = module.config
        if attention_of(config) not in (NAME, CAPTURED):
            raise AttngapError(
                f"This model was converted by attngap, and its config now asks for {attention_of(config)!r} attention, "
                "which would undo that. Load the original for another attention"
            )
        if not self.places:
            return None
        forget_pending()
        given = dict(zip(self.names, args, strict=False)) | kwargs
        cache = given.get("past_key_values")
        wanted = given.get("use_cache")
        wanted = getattr(config.get_text_config(), "use_cache", False) if wanted is None else wanted
        if cache is None and wanted and not module.training:
            cache = given["past_key_values"] = _plain_cache(config)
        if cache is not None:
            install(cache, self.places)
        return (), given


def empty_cache(model: PreTrainedModel) -> Any:
    """What a converted model fills."""
    cache = _plain_cache(model.config)
    install(cache, dict(_cache_places(model)))
    return cache


def _plain_cache(config: Any) -> Any:
    cache = DynamicCache(config=config)
    return EncoderDecoderCache(cache, DynamicCache(config=config)) if config.is_encoder_decoder else cache


def _cache_places(model: nn.Module) -> Iterator[tuple[int, Place]]:
    for part in model.modules():
        if isinstance(part, MixedHeads) and part.cache is not None:
            yield part.cache, Place(part.layer, part.groups, part.held)
