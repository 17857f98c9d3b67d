"""Read a prompt with softmax in every head, and keep of it what a converted model keeps.

A converted model approximates its replaced heads while it reads a prompt, and the errors of one layer are read by the
next. Where a prompt may cost what it costs the original, its heads can read it exactly, layer by layer, and only what
they leave behind is made small: window, sinks and sums of features, from exact keys and values.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache, PreTrainedModel

from attngap.errors import AttngapError
from attngap.mechanisms.held import hold
from attngap.mechanisms.rotary import Angles
from attngap.mechanisms.variants.hybrid import Hybrid
from attngap.models.cache import MixedLayer
from attngap.models.capture import Call, capture
from attngap.models.mixed import MixedHeads, mixed_heads
from attngap.models.swap import empty_cache


@torch.no_grad()
def exact_prefill(model: PreTrainedModel, input_ids: Int[Tensor, "b t"]) -> DynamicCache:
    """The cache of a converted model after prompts without padding that every head has read with softmax.

    Time and, for one layer at a time, memory are the original's. Any call goes on from it:

    >>> cache = exact_prefill(model, tokens[:, :-1])  # doctest: +SKIP
    >>> model.generate(tokens, past_key_values=cache)  # doctest: +SKIP
    """
    parts, cache = mixed_heads(model), empty_cache(model)
    other = [part.mechanism.name for part in parts.values() if not isinstance(part.mechanism, Hybrid)]
    if not parts or other or model.config.is_encoder_decoder:
        got = other[0] if other else type(model).__name__
        raise AttngapError(
            f"A prompt is read exactly by a converted decoder with a window, got {got}. Read it as usual"
        )

    def watch(call: Call) -> Tensor | None:
        part = parts.get(call.layer)
        index = call.layer if part is None or part.cache is None else part.cache
        hand_over(cache, index, part, call.k, call.v, call.rotary)
        return None if part is None else _softmax(call)

    with capture(model, watch):
        model(input_ids=input_ids, use_cache=False)
    return cache


def hand_over(
    cache: DynamicCache,
    index: int,
    part: MixedHeads | None,
    k: Float[Tensor, "b h_kv t d"],
    v: Float[Tensor, "b h_kv t dv"],
    rotary: Angles | None,
) -> None:
    """Put exact keys and values of whole prompts into an empty layer of a converted model's cache."""
    if part is None:
        cache.update(k, v, index)
        return
    layer = cache.layers[index]
    assert isinstance(layer, MixedLayer)
    assert isinstance(part.mechanism, Hybrid)
    layer.lazy_initialization(k, v)
    layer.append(k, v)
    state = part.mechanism.state_after(k.to(part.dtype), v.to(part.dtype), rotary)
    layer.state = hold(part.mechanism, state, rotary, heads=layer.heads)
    layer.seen = k.shape[2]
    layer.passed(None, layer.seen)


def _softmax(call: Call) -> Float[Tensor, "b h t dv"]:
    group = call.heads // call.kv_heads
    k, v = (x.repeat_interleave(group, 1) for x in (call.k, call.v))
    return F.scaled_dot_product_attention(call.q, k, v, is_causal=True, scale=call.scale)
