"""What a converted model saves: memory of its cache, and the time of a token that reads it."""

from collections.abc import Sequence

import torch
from pydantic import BaseModel, ConfigDict

from attngap.conversion.options import ConversionOptions
from attngap.costs.shape import ModelShape
from attngap.mechanisms.catalogue import mechanism
from attngap.mechanisms.held import held_floats
from attngap.models.plan import Replacement

STATE = 4  # bytes of a number of a replacement's state


class Gain(BaseModel):
    """At one context, whole groups of heads kept: bytes of both caches, and a token's seconds by what must be read."""

    model_config = ConfigDict(extra="forbid")
    context: int
    cache: int
    converted_cache: int
    token_seconds: float
    converted_token_seconds: float


def gains(
    shape: ModelShape, options: ConversionOptions, keep: float, contexts: Sequence[int], read: float, size: int
) -> list[Gain]:
    """A token costs the time to read all weights and the cache once: that is what bounds decoding one sequence."""
    near = Replacement(window=max(1, options.window), sinks=options.sinks)
    with torch.device("meta"):
        part = mechanism("hybrid", shape.heads, shape.dim, kv_heads=shape.kv_heads, **near.options())
    found = []
    for context in contexts:
        entry = 2 * context * shape.dim * size  # a key head's keys and values
        state = min(held_floats(part, context, shape.dim // 2) * STATE // shape.kv_heads, entry)
        whole = shape.layers * shape.kv_heads * entry
        groups = shape.replaceable * shape.kv_heads
        replaced = max(0, groups - int(keep * groups))
        converted = whole - replaced * (entry - state)
        weights = shape.parameters * size
        found.append(
            Gain(
                context=context,
                cache=whole,
                converted_cache=converted,
                token_seconds=(weights + whole) / read,
                converted_token_seconds=(weights + converted) / read,
            )
        )
    return found
