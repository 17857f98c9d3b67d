"""Decoding and reading prompts: a converted model against the original, and the limit that memory sets.

Both take turns, token by token, so that a disturbance meets both, and the least of all times counts. Milliseconds of
the processor, all threads together, stand beside those of the clock: other work on the same cores changes the latter.
"""

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from attngap.models.cache import cache_bytes, fill
from attngap.models.placement import device_of, synchronize

PROMPT = 320  # tokens read for real before decoding, more than sinks and window; the other keys are random
DECODED = 12  # tokens timed
REPEATS = 3  # of a prompt
PATIENCE = 20.0  # seconds: a prompt that takes longer is read once
Models = Mapping[str, Any]
Record = dict[str, Any]


def model_speeds(models: Models, contexts: Sequence[int], prompts: Sequence[int]) -> Iterator[tuple[str, Record]]:
    """(what was measured, its record): the read of the weights, every context, every prompt.

    Models beside the original and the converted one decode only.
    """
    yield "weights", reading(models["original"])
    for context in contexts:
        yield f"decode at {context}", decoding(models, context)
    both = {name: models[name] for name in ("original", "converted")}
    for length in prompts:
        yield f"prompt of {length}", prefill(both, length)


def reading(model: PreTrainedModel) -> Record:
    """A plain read of as many bytes as the weights have: the least that a token can take."""
    size = sum(x.numel() * x.element_size() for x in model.parameters())
    memory = torch.ones(max(1, size // 4))
    clock, processor = (min(each) for each in zip(*(_timed(memory.sum) for _ in range(5)), strict=True))
    return {"what": "weights", "mb": size / 1e6, "milliseconds": clock, "processor_milliseconds": processor}


@torch.no_grad()
def decoding(models: Models, context: int) -> Record:
    """One more token after `context` others. How fast it is does not depend on what the older keys are."""
    caches = {}
    for name, model in models.items():
        caches[name] = DynamicCache(config=model.config)
        prompt = torch.ones(1, min(PROMPT, context), dtype=torch.long, device=device_of(model))
        model(prompt, past_key_values=caches[name], use_cache=True)
        fill(caches[name], context, torch.Generator().manual_seed(0))
    held = {name: cache_bytes(cache) / 1e6 for name, cache in caches.items()}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    for i in range(DECODED):
        for name, model in models.items():
            device = device_of(model)
            given: dict[str, Any] = {"past_key_values": caches[name], "use_cache": True}
            given |= {"position_ids": torch.tensor([[context + i]], device=device)}
            given |= {"input_ids": torch.zeros(1, 1, dtype=torch.long, device=device)}
            times[name].append(_timed(lambda m=model, g=given: m(**g), device))
    del caches
    gc.collect()
    return {"what": "decode", "n": context, **_least(times), "cache_mb": held}


@torch.no_grad()
def prefill(models: Models, length: int) -> Record:
    """A whole prompt of random tokens, into an empty cache."""
    words = models["original"].config.get_text_config().vocab_size
    tokens = torch.randint(words, (1, length), generator=torch.Generator().manual_seed(0))
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    for _ in range(REPEATS):
        for name, model in models.items():
            if any(clock > 1e3 * PATIENCE for clock, _ in times[name]):
                continue
            device, cache = device_of(model), DynamicCache(config=model.config)
            given: dict[str, Any] = {"input_ids": tokens.to(device), "past_key_values": cache, "use_cache": True}
            times[name].append(_timed(lambda m=model, g=given: m(**g, logits_to_keep=1), device))
            del cache, given
            gc.collect()
    return {"what": "prefill", "n": length, **_least(times)}


def _timed(call: Callable[[], Any], device: torch.device | None = None) -> tuple[float, float]:
    """Milliseconds of the clock and of the processor."""
    clock, processor = time.perf_counter(), time.process_time()
    call()
    if device is not None:
        synchronize(device)
    return 1e3 * (time.perf_counter() - clock), 1e3 * (time.process_time() - processor)


def _least(times: Mapping[str, list[tuple[float, float]]]) -> Record:
    """The least of each, and how many times as fast the converted model is."""
    found: Record = {}
    for i, prefix in enumerate(("", "processor_")):
        least = {name: min(row[i] for row in rows) for name, rows in times.items()}
        found[f"{prefix}milliseconds"] = least
        found[f"{prefix}times_as_fast"] = least["original"] / least["converted"]
    return found
