"""Read a prompt with softmax in every head, and keep of it what a converted model keeps.

A converted model approximates its replaced heads while it reads a prompt, and the errors of one layer are read by the
next. Where a prompt may cost what it costs the original, its heads can read it exactly, layer by layer, and only what
they leave behind is made small: window, sinks and sums of features, from exact keys and values. Part of the window's
room then goes to tokens from anywhere in the prompt: those that the queries at its end miss most.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache, PreTrainedModel

from attngap.errors import AttngapError
from attngap.mechanisms.held import hold
from attngap.mechanisms.most_missed import ROWS, most_missed
from attngap.mechanisms.rotary import Angles
from attngap.mechanisms.variants.hybrid import Hybrid
from attngap.models.capture import Call, capture
from attngap.models.mixed import MixedHeads, mixed_heads
from attngap.models.mixed_layer import MixedLayer
from attngap.models.swap import empty_cache
from attngap.options import HELD

NARROWEST = 64  # window that is left: text reads its last tokens most


class Read(NamedTuple):
    """What a layer read of whole prompts: their last queries, all keys and values, and what turned them."""

    q: Float[Tensor, "b h n d"]
    k: Float[Tensor, "b h_kv t d"]
    v: Float[Tensor, "b h_kv t dv"]
    rotary: Angles | None

    @classmethod
    def of(cls, call: Call) -> "Read":
        return cls(call.q[:, :, -ROWS:].clone(), call.k, call.v, call.rotary)


@torch.no_grad()
def exact_prefill(model: PreTrainedModel, input_ids: Int[Tensor, "b t"], held: float = HELD) -> DynamicCache:
    """The cache of a converted model after prompts without padding that every head has read with softmax.

    A share `held` of each window's room, as far as `NARROWEST` of it are left, goes to the tokens from anywhere in the
    prompt that a replaced head would miss most (`attngap.mechanisms.most_missed`). The cache is as large as without.
    Time and, for one layer at a time, memory are the original's. Any call goes on from it:

    >>> cache = exact_prefill(model, tokens[:, :-1])  # doctest: +SKIP
    >>> model.generate(tokens, past_key_values=cache)  # doctest: +SKIP
    """
    if not 0 <= held < 1:
        raise AttngapError(f"held is a share of the window from 0 to below 1, got {held}. Half of it: 0.5")
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
        hand_over(cache, index, part, Read.of(call), held)
        return None if part is None else _softmax(call)

    with capture(model, watch):
        model(input_ids=input_ids, use_cache=False)
    return cache


def hand_over(cache: DynamicCache, index: int, part: MixedHeads | None, read: Read, held: float = HELD) -> None:
    """Put what a layer read of whole prompts into an empty layer of a converted model's cache."""
    if part is None:
        cache.update(read.k, read.v, index)
        return
    layer = cache.layers[index]
    assert isinstance(layer, MixedLayer)
    assert isinstance(part.mechanism, Hybrid)
    # What is held is asked of the prompt's own last queries here, and stays: a plain hybrid of the same room.
    mechanism = part.mechanism.with_window(part.mechanism.room)
    layer.lazy_initialization(read.k, read.v)
    layer.append(read.k, read.v)
    q, k, v = (x.to(part.dtype) for x in (read.q, read.k, read.v))
    long = k.shape[2] > mechanism.slots
    narrow, more = shared_room(mechanism, held if long else 0.0)
    tokens = most_missed(narrow, q, k, v, read.rotary, more)
    layer.form = (narrow.window, narrow.sinks + more) if more or part.mechanism.held else None
    state = narrow.state_after(k, v, read.rotary, tokens)
    layer.state = hold(layer.formed(part.mechanism), state, read.rotary, heads=layer.heads)
    layer.seen = k.shape[2]
    layer.passed(None, layer.seen)


def shared_room(mechanism: Hybrid, held: float) -> tuple[Hybrid, int]:
    """The mechanism with what is left of its window, and how many tokens are held for the rest."""
    more = min(round(held * mechanism.window), max(0, mechanism.window - NARROWEST))
    return mechanism.with_window(mechanism.window - more), more


def _softmax(call: Call) -> Float[Tensor, "b h t dv"]:
    group = call.heads // call.kv_heads
    k, v = (x.repeat_interleave(group, 1) for x in (call.k, call.v))
    return F.scaled_dot_product_attention(call.q, k, v, is_causal=True, scale=call.scale)
