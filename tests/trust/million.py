"""A million tokens through every linear mechanism and the cache of a converted model: memory stays, drift is stated.

The same tokens go through a float64 copy. They are fed in pieces of 1,000, as in prefill, and of every 100,000 the last
thousand one at a time, as in decoding. `drift` is the largest difference in 100 outputs (decoding, in one) over the
largest of them.
"""

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from attngap import catalogue, mechanism
from attngap.models.compat import DynamicCache
from attngap.models.swap import swap
from tests.trust.outcome import Outcome
from tests.zoo import mechanisms

TOKENS, PIECE, EVERY, SINGLY, SPAN = 1_000_000, 1_000, 100_000, 1_000, 100
GROWTH = 32_000_000  # bytes of the process after its first tenth; the allocator's own ups and downs are below
CACHE = "cache of a converted model"
OPTIONS: dict[str, dict[str, Any]] = {"hybrid": {"window": 64, "sinks": 4}, "cosformer": {"length": TOKENS}}


def names() -> list[str]:
    """Softmax keeps every token; all others have a state."""
    return [*(name for name in catalogue() if name != "softmax"), CACHE]


def pieces(tokens: int) -> Iterator[int]:
    """Lengths of pieces that add up to `tokens`; the last of them are always single ones."""
    done, every = 0, min(EVERY, tokens)
    while done < tokens:
        single = done % every >= every - SINGLY
        step = 1 if single else min(PIECE, tokens - done)
        yield step
        done += step


def stream(name: str, tokens: int = TOKENS) -> Outcome:
    """Feed them all; what grew and how far single precision has gone from double."""
    outcome, feed = Outcome(), _cache() if name == CACHE else _mixer(name)
    worst, done, sizes, memory = 0.0, 0, set(), 0
    for step in pieces(tokens):
        out, exact, size = feed(step)
        done += step
        sizes.add(size)
        worst = max(worst, drift(out, exact))
        if not out.isfinite().all():
            outcome.faults.append(f"{name}: not finite after {done} tokens")
            break
        if done >= tokens // 10 and not memory:
            memory = resident()
        if done in (tokens // 1000, tokens // 100, tokens // 10, tokens):
            outcome.measure(f"{name}, drift after {done}", worst)
    gc.collect()
    outcome.count(name, done)
    outcome.measure(f"{name}, growth of the process in bytes", max(0, resident() - memory))
    settled = {size for size in sizes if size == max(sizes)}
    if len(sizes) > 70 or len(settled) != 1:  # a window fills token by token, then nothing changes
        outcome.faults.append(f"{name}: its state had {len(sizes)} sizes, at last {max(sizes)} floats")
    if resident() - memory > GROWTH:
        outcome.faults.append(f"{name}: the process grew by {(resident() - memory) / 1e6:.0f} MB")
    return outcome


def drift(out: Tensor, exact: Tensor) -> float:
    """(..., t, d) each; rows are compared SPAN at a time, so that a large one does not hide many small ones."""
    spans = [x.split(SPAN, -2) for x in ((out.double() - exact).abs(), exact.abs())]
    return max(float(apart.max() / size.max().clamp_min(1e-30)) for apart, size in zip(*spans, strict=True))


Feed = Callable[[int], tuple[Tensor, Tensor, int]]


def _mixer(name: str) -> Feed:
    torch.manual_seed(0)
    single = mechanism(name, 2, 8, 8, **OPTIONS.get(name, {})).requires_grad_(False)
    double = copy.deepcopy(single).double()
    draw = torch.Generator().manual_seed(1)
    states: list[Any] = [None, None]
    start = [0]

    def feed(step: int) -> tuple[Tensor, Tensor, int]:
        q, k, v = torch.randn(3, 1, 2, step, 8, generator=draw)
        x = torch.randn(1, step, single.model_dim, generator=draw) if single.model_dim else None
        outs = []
        with torch.no_grad():
            for i, (mixer, dtype) in enumerate(((single, torch.float32), (double, torch.float64))):
                given = None if x is None else x.to(dtype)
                streams = mixer.read(given, q.to(dtype), k.to(dtype), v.to(dtype), start=start[0])
                held = states[i] if states[i] is not None else mixer.init_state(streams)
                out, states[i] = mixer.advance(streams, held)
                outs.append(out)
        start[0] += step
        return outs[0], outs[1], sum(x.numel() for x in states[0].values())

    return feed


def _cache() -> Feed:
    """One layer of a Llama, all heads replaced, its own cache in generation's way."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = LlamaConfig(
        **sizes, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=2 * TOKENS, initializer_range=0.3
    )
    model = LlamaForCausalLM(config).eval()
    made = mechanisms(model, window=64, sinks=4, rotary={}, map_options={"decay": True})  # as a conversion makes them
    single = swap(model, {layer: (m, []) for layer, m in made.items()})
    double = copy.deepcopy(single).double()
    draw = torch.Generator().manual_seed(1)
    caches = [DynamicCache(config=config), DynamicCache(config=config)]

    def feed(step: int) -> tuple[Tensor, Tensor, int]:
        tokens = torch.randint(0, 64, (1, step), generator=draw)
        # The mask that transformers would make for a piece is as long as all that came before, and grows.
        mask = torch.ones(1, 1, step, step, dtype=torch.bool).tril() if step > 1 else None
        with torch.no_grad():
            out, exact = (
                m(tokens, attention_mask=mask, past_key_values=c, use_cache=True).logits
                for m, c in zip((single, double), caches, strict=True)
            )
        held = [x for layer in caches[0].layers for x in _tensors(vars(layer))]
        return out, exact, sum(x.numel() for x in held)

    return feed


def _tensors(found: Any) -> Iterator[Tensor]:
    if isinstance(found, Tensor):
        yield found
    elif isinstance(found, dict | list | tuple):
        for each in found.values() if isinstance(found, dict) else found:
            yield from _tensors(each)


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
