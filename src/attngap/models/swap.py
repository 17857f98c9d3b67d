"""Replace attention heads through transformers' attention interface: kept heads by SDPA, the others by a mechanism.

A converted model is a twin of the original: it shares the weights and differs in its attention modules, each of which
may carry a child `attngap` that says which heads are kept and holds the mechanism of the others.
"""

import dataclasses
import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from attngap.errors import AttngapError
from attngap.mechanisms.base import Mechanism
from attngap.mechanisms.decoding import decoder, possible
from attngap.mechanisms.rotary import Angles
from attngap.mechanisms.variants.hybrid import Hybrid
from attngap.models.angles import angles_of, note_angles
from attngap.models.cache import MixedLayer, forget_pending, install, pending, waiting
from attngap.models.capture import NAME as CAPTURED
from attngap.models.capture import Call, allowed, attention_configs, capture
from attngap.models.compat import (
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    LinearAttentionAndFullAttentionLayer,
    attention_of,
    own_cache,
    sdpa_attention_forward,
    sdpa_mask,
    set_attention,
)
from attngap.models.masks import readable
from attngap.models.mode import evaluating, tokens_suffice
from attngap.models.twin import CHILD, converted_class, twin
from attngap.ops.hybrid import KeptHeads

NAME = "attngap"
REFUSED = ("softcap", "s_aux", "position_bias", "sliding_window", "indices", "block_indices")


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


class MixedHeads(nn.Module):
    """One attention module's heads: `keep` stay softmax, `mechanism` computes the others (and is asked for all)."""

    keep: Tensor  # heads
    groups: Tensor  # key heads that some kept head reads
    place: Tensor  # where among these each head's keys are, -1 for heads that are not kept

    def __init__(self, layer: int, mechanism: Mechanism, keep: Iterable[int], cache: int | None = None):
        super().__init__()
        self.layer, self.cache = layer, cache
        heads = sorted(set(keep))
        group = mechanism.heads // mechanism.kv_heads
        groups = sorted({head // group for head in heads})
        self.readers = [[head for head in heads if head // group == place] for place in groups]
        self.mechanism = mechanism
        self.register_buffer("keep", torch.tensor(heads, dtype=torch.long), persistent=False)
        self.register_buffer("groups", torch.tensor(groups, dtype=torch.long), persistent=False)
        place = [groups.index(head // group) if head in heads else -1 for head in range(mechanism.heads)]
        self.register_buffer("place", torch.tensor(place, dtype=torch.long), persistent=False)

    def forward(
        self,
        q: Float[Tensor, "b h t d"],
        k: Float[Tensor, "b h_kv t d"],
        v: Float[Tensor, "b h_kv t dv"],
        mask: Tensor | None,
        scale: float | None,
        rotary: Angles | None = None,
    ) -> Float[Tensor, "b h t dv"]:
        cache = pending(self.layer)
        causal = self.mechanism.causal
        if cache is None and k.shape[2] != q.shape[2]:
            raise AttngapError(
                f"Replaced heads got {k.shape[2]} keys for {q.shape[2]} queries from a cache that is not theirs. "
                "Pass past_key_values=DynamicCache(config=model.config) and let the converted model fill it"
            )
        real = real_tokens(mask, q.shape[2], causal=causal)
        real = None if real is None else real.expand(len(q), -1)
        if cache is not None and self._decodes(cache, q, scale):
            return self._decode(cache, q, k, v, mask, real, rotary)
        streams = (q.to(self.dtype), k.to(self.dtype), v.to(self.dtype))
        if cache is None:
            out = self.mechanism(None, *streams, mask=real, rotary=rotary)[0]
        else:
            out = cache.compute(self.mechanism, *streams, real, rotary)
        out = out.to(v.dtype)
        if len(self.keep):
            keys, values = (k[:, self.groups], v[:, self.groups]) if cache is None else cache.append(k, v)
            exact = [
                F.scaled_dot_product_attention(
                    q[:, heads],
                    # Seen by all heads that read it, not copied: a copy costs more than attention over a long cache.
                    keys[:, place : place + 1].expand(-1, len(heads), -1, -1),
                    values[:, place : place + 1].expand(-1, len(heads), -1, -1),
                    attn_mask=mask,
                    is_causal=causal and mask is None and q.shape[2] > 1,
                    scale=scale,
                )
                for place, heads in enumerate(self.readers)
            ]
            out = out.index_copy(1, self.keep, torch.cat(exact, 1).to(out.dtype))
        return out

    def token(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, rotary: Angles | None
    ) -> Float[Tensor, "b 1 h dv"] | None:
        """One new token of all heads by one compiled call; None where that is not to be had."""
        mechanism, cache = self._modules["mechanism"], waiting(self.layer)
        if cache is None or cache.past is not None or not isinstance(mechanism, Hybrid) or not possible():
            return None
        state = cache.state
        if (
            state is None
            or q.dtype != state["S"].dtype
            or (q.shape[3] ** -0.5 if scale is None else scale) != mechanism.scale
        ):
            return None
        if mask is not None and (mask.dtype != torch.bool or mask.shape[1:3] != (1, 1)):
            return None
        found = cache.decoder
        if found is None or not found.fits(mechanism, state, cache.count):
            found = cache.decoder = decoder(mechanism, state, self.place, cache.count, rotary)
        if found is None:
            return None
        out = found.token(q, k, v, rotary, mask, cache.grow() if self.readers else None)
        forget_pending()
        cache.unread = False
        return out

    def _decodes(self, cache: MixedLayer, q: Tensor, scale: float | None) -> bool:
        """Whether one call serves all heads: one new token, of hybrid heads and kept ones, that is not taken back."""
        mechanism = self.mechanism
        if not isinstance(mechanism, Hybrid) or q.shape[2] > 1 or not len(self.keep) or torch.is_grad_enabled():
            return False
        if cache.state is None or cache.past is not None or q.dtype != self.dtype:
            return False
        return (q.shape[3] ** -0.5 if scale is None else scale) == mechanism.scale

    def _decode(
        self,
        cache: MixedLayer,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        real: Tensor | None,
        rotary: Angles | None,
    ) -> Tensor:
        assert isinstance(self.mechanism, Hybrid)
        assert cache.state is not None
        streams = self.mechanism.read(None, q, k, v, start=cache.count, mask=real, rotary=rotary)
        may = None if mask is None else readable(mask)[:, 0, 0]
        out = self.mechanism.decode(streams, cache.state, KeptHeads(self.place, *cache.append(k, v), may))
        cache.passed(real, 1)
        return out

    @property
    def dtype(self) -> torch.dtype:
        """What the mechanism computes in: its parameters' own, at least single precision."""
        return next((x.dtype for x in self.mechanism.parameters() if x.is_floating_point()), torch.float32)

    def _apply(self, fn: Any, recurse: bool = True) -> "MixedHeads":
        """A model cast to half precision keeps its replacements as they were fitted: sums over a long past need it."""

        def keep_dtype(x: Tensor) -> Tensor:
            moved = fn(x)
            if not x.is_floating_point() or x.is_meta or moved.dtype in (torch.float32, torch.float64):
                return moved
            return x.to(moved.device)

        super()._apply(keep_dtype, recurse)
        return self


def real_tokens(mask: Tensor | None, length: int, *, causal: bool) -> Bool[Tensor, "b t"] | None:
    """Which of the last `length` tokens are no padding, read off a mask `(b, 1, length, keys)`; None when all are.

    A replaced head knows padding and causality only, so a mask that says anything else is refused.
    """
    if mask is None:
        return None
    allowed = readable(mask)
    if mask.shape[1] != 1:
        raise AttngapError("Replaced heads take one mask for all heads, and this one differs from head to head")
    new = allowed[:, 0, :, allowed.shape[3] - length :]  # (b, t, t)
    real = new.diagonal(dim1=1, dim2=2) if causal else new[:, 0]
    expected = real[:, None, :].expand(-1, length, -1)
    expected = expected.tril() if causal else expected
    if not torch.equal(new & real[:, :, None], expected & real[:, :, None]):
        raise AttngapError(
            "Replaced heads handle causal and padding masks only, and this mask is another (packed sequences, or "
            "one of your own). Pass a 2D attention_mask, one sequence a row"
        )
    return None if bool(real.all()) else real


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
    holders = [(x.k if x.source is None else x.source).untyped_storage().data_ptr() for x in calls]
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


def _two_tokens(model: PreTrainedModel) -> Any:
    parameters = inspect.signature(model.forward).parameters
    if "input_ids" not in parameters:
        raise AttngapError(
            f"{type(model).__name__} takes {next(iter(parameters), 'nothing')} and no tokens. Only models that read "
            "text are supported"
        )
    tokens = torch.ones(1, 2, dtype=torch.long, device=model.device)
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


def mixed_heads(model: nn.Module) -> dict[int, MixedHeads]:
    """The converted attention modules by layer."""
    found = (part for part in model.modules() if isinstance(part, MixedHeads))
    return {part.layer: part for part in sorted(found, key=lambda part: part.layer)}


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
        self.groups = dict(_cache_groups(model))

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
        config: Any = module.config
        if attention_of(config) not in (NAME, CAPTURED):
            raise AttngapError(
                f"This model was converted by attngap, and its config now asks for {attention_of(config)!r} attention, "
                "which would undo that. Load the original for another attention"
            )
        if not self.groups:
            return None
        forget_pending()
        given = dict(zip(self.names, args, strict=False)) | kwargs
        cache = given.get("past_key_values")
        wanted = given.get("use_cache")
        wanted = getattr(config.get_text_config(), "use_cache", False) if wanted is None else wanted
        if cache is None and wanted and not module.training:
            cache = given["past_key_values"] = _plain_cache(config)
        if cache is not None:
            install(cache, self.groups)
        return (), given


def empty_cache(model: PreTrainedModel) -> Any:
    """What a converted model fills."""
    cache = _plain_cache(model.config)
    install(cache, dict(_cache_groups(model)))
    return cache


def _plain_cache(config: Any) -> Any:
    cache = DynamicCache(config=config)
    return EncoderDecoderCache(cache, DynamicCache(config=config)) if config.is_encoder_decoder else cache


def _cache_groups(model: nn.Module) -> Iterator[tuple[int, tuple[int, Tensor]]]:
    for part in model.modules():
        if isinstance(part, MixedHeads) and part.cache is not None:
            yield part.cache, (part.layer, part.groups)
