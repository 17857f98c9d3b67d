"""Decoding and reading prompts: a converted model against the original, and the limit that memory sets.

Both take turns, token by token, so that a disturbance meets both, and the least of all times counts. Milliseconds of
the processor, all threads together, stand beside those of the clock: other work on the same cores changes the latter.
"""

import gc
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from attngap.benchmark.bound import without_attention
from attngap.models.cache import cache_bytes
from attngap.models.placement import device_of, synchronize
from attngap.models.pretended import PretendedCaches, reach
from attngap.models.twin import PIECE

BOUND = "without attention"  # all of the original but that
DECODED = 12  # tokens timed
REPEATS = 3  # of a prompt
PATIENCE = 20.0  # seconds: a prompt that takes longer is read once
Models = Mapping[str, Any]
Record = dict[str, Any]


def model_speeds(models: Models, contexts: Sequence[int], prompts: Sequence[int]) -> Iterator[tuple[str, Record]]:
    """(what was measured, its record): the read of the weights, every context, every prompt.

    Prompts are read by the original without its attention too: what that takes, with the linear layers that a converted
    model has, is the least that any attention could come to. Lengths beyond a model's positions, where these end, are
    left out.
    """
    original = models["original"]
    yield "weights", reading(original)
    caches = {name: PretendedCaches(model) for name, model in models.items()}
    for context in (each for each in contexts if each + DECODED <= reach(original)):
        yield f"decode at {context}", decoding(caches, context)
    prompts = [each for each in prompts if each <= reach(original)]
    if prompts:
        readers = {**models, BOUND: without_attention(original)}
        for length in prompts:
            yield f"prompt of {length}", prefill(readers, length)


def reading(model: PreTrainedModel) -> Record:
    """A plain read of as many bytes as the weights have: the least that a token can take."""
    size = sum(x.numel() * x.element_size() for x in model.parameters())
    memory = torch.ones(max(1, size // 4))
    clock, processor = (min(each) for each in zip(*(_timed(memory.sum) for _ in range(5)), strict=True))
    return {"what": "weights", "mb": size / 1e6, "milliseconds": clock, "processor_milliseconds": processor}


@torch.no_grad()
def decoding(pretended: Mapping[str, PretendedCaches], context: int) -> Record:
    """One more token after `context` others, for every model whose caches these are."""
    caches = {name: each.of(context) for name, each in pretended.items()}
    held = {name: cache_bytes(cache) / 1e6 for name, cache in caches.items()}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in caches}
    for i in range(DECODED):
        for name, cache in caches.items():
            model = pretended[name].model
            device = device_of(model)
            given: dict[str, Any] = {"past_key_values": cache, "use_cache": True}
            given |= {"position_ids": torch.tensor([[context + i]], device=device)}
            given |= {"input_ids": torch.zeros(1, 1, dtype=torch.long, device=device)}
            times[name].append(_timed(lambda m=model, g=given: m(**g), device))
    del caches
    gc.collect()
    return {"what": "decode", "n": context, **_least(times), "cache_mb": held}


@torch.no_grad()
def prefill(models: Models, length: int) -> Record:
    """A whole prompt of random tokens, into an empty cache: at once or, where that is quicker, in pieces."""
    words = models["original"].config.get_text_config().vocab_size
    tokens = torch.randint(words, (1, length), generator=torch.Generator().manual_seed(0))
    pieces = dict.fromkeys((length, min(PIECE, length)))
    times: dict[str, dict[int, list[tuple[float, float]]]] = {name: {size: [] for size in pieces} for name in models}
    for _ in range(REPEATS):
        for (name, model), size in itertools.product(models.items(), pieces):
            if all(clock <= 1e3 * PATIENCE for clock, _ in times[name][size]):
                times[name][size].append(_timed(lambda m=model, n=size: _read(m, tokens, n), device_of(model)))
                gc.collect()
    quickest = {name: min(rows.items(), key=lambda each: min(each[1]))[0] for name, rows in times.items()}
    least = _least({name: rows[quickest[name]] for name, rows in times.items()})
    return {"what": "prefill", "n": length, **least, "tokens_at_once": quickest}


def _read(model: PreTrainedModel, tokens: Tensor, size: int) -> None:
    cache = DynamicCache(config=model.config)
    for piece in tokens.to(device_of(model)).split(size, dim=1):
        model(input_ids=piece, past_key_values=cache, use_cache=True, logits_to_keep=1)


def _timed(call: Callable[[], Any], device: torch.device | None = None) -> tuple[float, float]:
    """Milliseconds of the clock and of the processor."""
    clock, processor = time.perf_counter(), time.process_time()
    call()
    if device is not None:
        synchronize(device)
    return 1e3 * (time.perf_counter() - clock), 1e3 * (time.process_time() - processor)


def _least(times: Mapping[str, list[tuple[float, float]]]) -> Record:
    """The least of each, how many times as fast the converted model is, and how many times any could be."""
    found: Record = {}
    for i, prefix in enumerate(("", "processor_")):
        least = {name: min(row[i] for row in rows) for name, rows in times.items()}
        found[f"{prefix}milliseconds"] = least
        found[f"{prefix}times_as_fast"] = least["original"] / least["converted"]
        if BOUND in least:
            found[f"{prefix}times_as_fast_at_most"] = least["original"] / least[BOUND]
    return found
