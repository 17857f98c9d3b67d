"""Replace attention heads through transformers' attention interface: kept heads by SDPA, the others by a mechanism.

A converted model is a twin of the original: it shares the weights and differs in its attention modules, each of which
may carry a child `attngap` that says which heads are kept and holds the mechanism of the others.
"""

import copy
import dataclasses
import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from attngap.errors import AttngapError
from attngap.mechanisms.base import Mechanism, Streams
from attngap.mechanisms.rotary import Angles
from attngap.mechanisms.variants.hybrid import Hybrid
from attngap.models.angles import angles_of, note_angles
from attngap.models.cache import MixedLayer, cache_of, install
from attngap.models.capture import Call, attention_configs, capture
from attngap.models.masks import readable
from attngap.ops.hybrid import KeptHeads

NAME = "attngap"
CHILD = "attngap"
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


class MixedHeads(nn.Module):
    """One attention module's heads: `keep` stay softmax, `mechanism` computes the others (and is asked for all)."""

    keep: Tensor  # heads
    groups: Tensor  # key heads that some kept head reads
    place: Tensor  # where among these each head's keys are, -1 for heads that are not kept

    def __init__(self, layer: int, mechanism: Mechanism, keep: Iterable[int]):
        super().__init__()
        self.layer = layer
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
        cache = cache_of(k)
        causal = self.mechanism.causal
        real = real_tokens(mask, q.shape[2], causal=causal)
        if cache is None or cache.state is None:
            state, out = self.mechanism(None, q, k, v, mask=real, rotary=rotary)
        else:
            streams = self.mechanism.read(None, q, k, v, start=cache.count, mask=real, rotary=rotary)
            if self._decodes(q, scale):
                out = self._decode(streams, cache, mask)
                cache.advance(cache.state, real, 1)
                return out
            state, out = self.mechanism.advance(streams, cache.state)
        if cache is not None:
            cache.advance(state, real, q.shape[2])
        if len(self.keep):
            keys, values = (k[:, self.groups], v[:, self.groups]) if cache is None else (cache.keys, cache.values)
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

    def _decodes(self, q: Tensor, scale: float | None) -> bool:
        """Whether one call serves all heads: one new token, of hybrid heads and kept ones."""
        mechanism = self.mechanism
        if not isinstance(mechanism, Hybrid) or q.shape[2] > 1 or not len(self.keep) or torch.is_grad_enabled():
            return False
        return (q.shape[3] ** -0.5 if scale is None else scale) == mechanism.scale

    def _decode(self, streams: Streams, cache: MixedLayer, mask: Tensor | None) -> Tensor:
        assert isinstance(self.mechanism, Hybrid)
        assert cache.state is not None
        allowed = None if mask is None else readable(mask)[:, 0, 0]
        return self.mechanism.decode(streams, cache.state, KeptHeads(self.place, cache.keys, cache.values, allowed))


def real_tokens(mask: Tensor | None, length: int, *, causal: bool) -> Bool[Tensor, "b t"] | None:
    """Which of the last `length` tokens are no padding, read off a mask `(b, 1, length, keys)`; None when all are.

    A replaced head knows padding and causality only, so a mask that says anything else is refused.
    """
    if mask is None:
        return None
    allowed = readable(mask)
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
    if cache_of(key) is None and key.shape[2] != query.shape[2]:
        raise AttngapError(
            f"Replaced heads got {key.shape[2]} keys for {query.shape[2]} queries from a cache that is not theirs. "
            "Pass past_key_values=DynamicCache() and let the converted model fill it"
        )
    out = mixed(query, key, value, attention_mask, kwargs.get("scaling"), angles_of(module))
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)


def layer_shapes(model: PreTrainedModel) -> list[LayerShape]:
    """Every self-attention call of the model, in order, found by running two tokens through it."""
    names = {id(module): name for name, module in model.named_modules()}
    found: list[LayerShape] = []

    def note(call: Call) -> None:
        if not call.cross:
            found.append(_shape(call, names[id(call.module)]))

    was_training = model.training
    try:
        with torch.no_grad(), capture(model.eval(), note):
            model(input_ids=torch.zeros(1, 2, dtype=torch.long, device=model.device))
    finally:
        model.train(was_training)
    repeated = len(found) - len({shape.module for shape in found})
    if repeated:
        raise AttngapError(f"{type(model).__name__} calls {repeated} attention modules twice; not supported")
    return found


def _shape(call: Call, name: str) -> LayerShape:
    obstacle = None
    if call.window is not None:
        obstacle = f"it has a sliding window of {call.window} already, so its cost is bounded"
    elif call.bias is not None:
        obstacle = "its logits carry a learned position bias, which no replacement here reproduces"
    return LayerShape(
        layer=call.layer,
        module=name,
        heads=call.heads,
        kv_heads=call.kv_heads,
        dim=call.q.shape[-1],
        value_dim=call.v.shape[-1],
        scale=call.scale,
        causal=call.causal,
        obstacle=obstacle,
    )


def twin(model: PreTrainedModel) -> PreTrainedModel:
    """A copy with modules and configs of its own that shares every parameter and buffer with the original."""
    shared: dict[int, Any] = {id(x): x for x in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)


def swap(model: PreTrainedModel, layers: Mapping[int, tuple[Mechanism, Iterable[int]]]) -> PreTrainedModel:
    """A twin of the model in which layer i runs `layers[i] = (mechanism, heads that keep softmax)`.

    The original is not changed. Layers that are not mentioned stay as they are.
    """
    shapes = {shape.layer: shape for shape in layer_shapes(model)}
    for layer, (mechanism, keep) in layers.items():
        _check(layer, shapes, mechanism, keep)
    converted = twin(model)
    for layer, (mechanism, keep) in layers.items():
        module = converted.get_submodule(shapes[layer].module)
        module.add_module(CHILD, MixedHeads(layer, mechanism, keep))
    attach(converted)
    return converted


def attach(model: PreTrainedModel) -> None:
    """Route the model's attention through `attend`, and every empty cache it is given through mixed layers."""
    for config in attention_configs(model):
        config._attn_implementation_internal = NAME
    note_angles(model)
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

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple, dict]:
        given = dict(zip(self.names, args, strict=False)) | kwargs
        cache = given.get("past_key_values")
        config: Any = module.config
        wanted = given.get("use_cache")
        wanted = getattr(config, "use_cache", False) if wanted is None else wanted
        if cache is None and wanted and not module.training:
            cache = DynamicCache(config=config)
            given["past_key_values"] = cache
        if cache is not None:
            install(cache, self.groups)
        return (), given


def _cache_groups(model: nn.Module) -> Iterator[tuple[int, Tensor]]:
    for part in model.modules():
        mixed = part._modules.get(CHILD)
        if isinstance(mixed, MixedHeads) and mixed.mechanism.causal:
            index: Any = part.layer_idx
            yield index, mixed.groups
