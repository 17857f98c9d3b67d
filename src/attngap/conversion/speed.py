"""Tokens per second and cache memory, the original and the converted model in the same run."""

import statistics
import time
from collections.abc import Mapping, Sequence

import torch
from pydantic import BaseModel, ConfigDict
from transformers import DynamicCache, PreTrainedModel

from attngap.models.cache import cache_bytes
from attngap.models.placement import device_of, synchronize
from attngap.models.pretended import PretendedCaches, reach

DECODED = 12  # tokens timed, of which the median counts


class Speed(BaseModel):
    """One model at one context. Prefill is None where it was not run: it takes minutes at long contexts on a CPU."""

    model_config = ConfigDict(extra="forbid")
    context: int
    prefill: float | None  # tokens per second
    decode: float  # tokens per second
    cache_bytes: int


def speeds(
    models: Mapping[str, PreTrainedModel], contexts: Sequence[int], *, prefill_up_to: int
) -> dict[str, list[Speed]]:
    """Every model at every context it can reach, one after the other at each context so that they share conditions."""
    found: dict[str, list[Speed]] = {name: [] for name in models}
    caches = {name: PretendedCaches(model) for name, model in models.items()}
    for context in contexts:
        for name, model in models.items():
            if context + DECODED <= reach(model):
                found[name].append(speed(caches[name], context, prefill=context <= prefill_up_to))
    return found


@torch.no_grad()
def speed(caches: PretendedCaches, context: int, *, prefill: bool) -> Speed:
    """Of the model whose caches these are: decoding, and a whole prompt where that is asked for."""
    model = caches.model
    rate, device = None, device_of(model)
    if prefill:
        tokens = torch.randint(
            model.config.get_text_config().vocab_size, (1, context), generator=torch.Generator().manual_seed(0)
        )
        start = time.perf_counter()
        model(tokens.to(device), past_key_values=DynamicCache(config=model.config), use_cache=True, logits_to_keep=1)
        synchronize(device)
        rate = context / (time.perf_counter() - start)
    cache = caches.of(context)
    held = cache_bytes(cache)
    token = torch.zeros(1, 1, dtype=torch.long, device=device)
    times = []
    for i in range(DECODED):
        place = torch.tensor([[context + i]], device=device)
        start = time.perf_counter()
        model(token, past_key_values=cache, use_cache=True, position_ids=place)
        synchronize(device)
        times.append(time.perf_counter() - start)
    return Speed(context=context, prefill=rate, decode=1 / statistics.median(times), cache_bytes=held)
