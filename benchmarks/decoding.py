"""Decoding and prefill of SmolLM2 with a tenth of its heads kept against the original, and the limit that memory sets.

    OMP_NUM_THREADS=1 python benchmarks/decoding.py --contexts 256 1024 4096 16384 --prefill 512 1024 4096 -o speed.json
    OMP_NUM_THREADS=1 python benchmarks/decoding.py --contexts 1024 --weights bfloat16 int8

Heads are replaced by what a conversion builds, with prototypes that were not fitted: how fast they are does not depend
on their numbers. Both models take turns, token by token. Milliseconds of the clock stand before those of the processor,
because other work on the same cores changes the former; both are the least of all tokens. A token needs every weight
once, so the limit is the time of a plain read of as many bytes. int8 is torch's dynamic quantization of linear layers.
"""

import argparse
import gc
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from attngap.heads.replacement import build_replacement
from attngap.models.cache import cache_bytes, fill
from attngap.models.load import load_model
from attngap.models.plan import Replacement
from attngap.models.positions import layer_positions
from attngap.models.shapes import layer_shapes
from attngap.models.swap import swap
from attngap.options import KEEP, SINKS, WINDOW
from attngap.provenance import provenance

PROMPT = SINKS + WINDOW + 60  # for real, so that features are read; the other keys are random
DECODED = 12  # tokens timed


def converted(model: PreTrainedModel) -> PreTrainedModel:
    """Whole groups of heads are kept, spread over the layers."""
    layers, shapes = {}, layer_shapes(model)
    groups = [(shape.layer, group) for shape in shapes for group in range(shape.kv_heads)]
    kept = set(groups[:: round(1 / KEEP)])
    for shape, positions in zip(shapes, layer_positions(model), strict=True):
        mechanism, _ = build_replacement(shape, Replacement(), positions=positions)
        size = shape.heads // shape.kv_heads
        heads = [head for head in range(shape.heads) if (shape.layer, head // size) in kept]
        layers[shape.layer] = mechanism.requires_grad_(False), heads
    return swap(model, layers)


def with_weights(weights: str) -> dict[str, Any]:
    """Original and converted, with their weights in this type; what replaces heads computes in float32."""
    model = load_model("smollm2").eval()
    if weights == "bfloat16":
        model = model.to(torch.bfloat16)
    models: dict[str, Any] = {"original": model, "converted": converted(model)}
    if weights == "int8":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that this form of quantization will move to another package
            quantized = torch.ao.quantization.quantize_dynamic
            models = {name: quantized(each, {torch.nn.Linear}, dtype=torch.qint8) for name, each in models.items()}
    return models


def timed(call: Callable[[], Any]) -> tuple[float, float]:
    """Milliseconds of the clock and of the processor."""
    clock, processor = time.perf_counter(), time.process_time()
    call()
    return 1e3 * (time.perf_counter() - clock), 1e3 * (time.process_time() - processor)


def least(times: dict[str, list[tuple[float, float]]]) -> dict[str, Any]:
    """The least of each, and how many times as fast the converted model is."""
    found: dict[str, Any] = {
        name: [round(min(each), 2) for each in zip(*rows, strict=True)] for name, rows in times.items()
    }
    clock, processor = (a / b for a, b in zip(found["original"], found["converted"], strict=True))
    return found | {"ratio_clock": round(clock, 3), "ratio_processor": round(processor, 3)}


def decoding(models: dict[str, Any], context: int) -> dict[str, Any]:
    token, caches = torch.zeros(1, 1, dtype=torch.long), {}
    for name, model in models.items():
        caches[name] = DynamicCache(config=model.config)
        model(torch.ones(1, min(PROMPT, context), dtype=torch.long), past_key_values=caches[name], logits_to_keep=1)
        fill(caches[name], context, torch.Generator().manual_seed(0))
    held = {f"{name}_cache_mb": round(cache_bytes(cache) / 1e6, 1) for name, cache in caches.items()}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    for i in range(DECODED):
        where = torch.tensor([[context + i]])
        for name, model in models.items():
            cache = caches[name]
            times[name].append(timed(lambda m=model, c=cache, w=where: m(token, past_key_values=c, position_ids=w)))
    return {"decode": context, **least(times), **held}


def prefill(models: dict[str, Any], length: int, repeats: int) -> dict[str, Any]:
    tokens = torch.randint(
        models["original"].config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0)
    )
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    for _ in range(repeats):
        for name, model in models.items():
            cache = DynamicCache(config=model.config)
            times[name].append(timed(lambda m=model, c=cache: m(tokens, past_key_values=c, logits_to_keep=1)))
    return {"prefill": length, **least(times)}


def reading(model: Any) -> dict[str, Any]:
    """The time of a plain read of as many bytes as the weights have: the least that a token can take."""
    size = sum(x.numel() * x.element_size() for x in model.parameters())
    memory = torch.ones(size // 4)
    clock, processor = (min(each) for each in zip(*(timed(memory.sum) for _ in range(5)), strict=True))
    return {
        "weights_mb": round(size / 1e6),
        "read": [round(clock, 2), round(processor, 2)],
        "gb_s": size / processor / 1e6,
    }


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="*", default=[256, 1024, 4096, 16384])
    parser.add_argument("--prefill", type=int, nargs="*", default=[])
    parser.add_argument("--repeats", type=int, default=3, help="of a prefill")
    parser.add_argument("--weights", nargs="*", default=["float32"], choices=["float32", "bfloat16", "int8"])
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for weights in options.weights:
        models = with_weights(weights)
        if weights != "int8":  # packed weights are no parameters
            rows.append({"weights": weights, **reading(models["original"])})
            print(json.dumps(rows[-1]), flush=True)
        jobs = [lambda n=n, m=models: decoding(m, n) for n in options.contexts]
        jobs += [lambda n=n, m=models: prefill(m, n, options.repeats) for n in options.prefill]
        for job in jobs:
            rows.append({"weights": weights, **job()})
            print(json.dumps(rows[-1]), flush=True)
            gc.collect()
    if options.output:
        record = {"threads": torch.get_num_threads(), "rows": rows, "provenance": provenance()}
        options.output.write_text(json.dumps(record, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
