"""Which heads of an encoder should keep softmax? It has no cache to compress, so that the choice is all there is.

All heads are replaced by features that are fitted once; each score then gives softmax back to some. What counts is how
far the embedding of a passage turns, on text that nothing was fitted to or chosen on.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from scores import SHARES
from torch import Tensor

CONTEXT, CALIBRATED, JUDGED, SEED = 256, 12, 24, 11  # tokens of a passage, passages fitted to and asked about
ENCODERS = "encoder.json"
Scores = dict[tuple[int, int], float]


def encoder(options: argparse.Namespace) -> None:
    """Every score at every share; the whole takes a minute or two for a MiniLM."""
    import attngap
    from attngap.conversion.joint import Reference
    from attngap.heads.passages import passages

    if not options.text:
        raise SystemExit("rivals encoder needs --text, of a kind that nothing was fitted to")
    model, tokenizer = attngap.load(options.model)
    tokens = passages(tokenizer, None, context=CONTEXT, count=4, seed=SEED)
    text = "\n\n".join(path.read_text(encoding="utf-8") for path in options.text)
    asked = passages(tokenizer, text, context=CONTEXT, count=JUDGED, seed=SEED)
    mechanisms = fitted(model, tokenizer)
    found = compare(model, mechanisms, Reference(model, tokens), tokens, asked)
    (options.output / ENCODERS).write_text(json.dumps({"model": options.model, "rows": found}, indent=1))


def fitted(model: Any, tokenizer: Any) -> Mapping[int, Any]:
    """The replacements of all heads, fitted together."""
    import attngap
    from attngap.models.mixed import mixed_heads

    sizes = {"context": CONTEXT, "tokens": CALIBRATED * CONTEXT}
    with torch.enable_grad():
        converted, _ = attngap.linearize(model, tokenizer, keep=0.0, measured=False, **sizes)
    return {layer: part.mechanism for layer, part in mixed_heads(converted).items()}


def compare(model: Any, mechanisms: Mapping[int, Any], reference: Any, tokens: Tensor, asked: Tensor) -> list[dict]:
    """How far embeddings turn with each share of heads kept, by each score."""
    from attngap.conversion.choose import PassageJudge, convert, group_sizes, prune
    from attngap.heads.choice import best_heads

    judge, alone = PassageJudge(model, mechanisms, reference), group_sizes(mechanisms, grouped=False)
    heads = [(layer, head) for layer, m in mechanisms.items() for head in range(m.heads)]

    def ours(count: int) -> frozenset:
        with torch.enable_grad():
            return prune(judge, count, alone, rounds=2, advance=lambda *args, **kwargs: None)

    def by(score: Callable[[], Scores]) -> Callable[[int], frozenset]:
        values: list[Scores] = []  # once for all shares

        def choose(count: int) -> frozenset:
            values.extend([score()] if not values else [])
            return best_heads(values[0], count, alone)

        return choose

    rng, whole, found = random.Random(SEED), embeddings(model, asked), []
    choices = {
        "our": ours,
        "entropy": by(lambda: entropy(model, tokens)),
        "ablation": by(lambda: ablation(model, tokens, heads)),
        "random": by(lambda: {head: rng.random() for head in heads}),
    }
    for name, choose in choices.items():
        for share in (0.0, *SHARES):
            start = time.process_time()
            kept = choose(round(share * len(heads)))
            seconds = time.process_time() - start
            turned = 1 - (embeddings(convert(model, mechanisms, kept), asked) * whole).sum(-1)
            row = {"score": name, "share": share, "kept": len(kept), "seconds": seconds}
            row |= {"turned": float(turned.mean()), "error": statistics.stdev(turned.tolist()) / len(turned) ** 0.5}
            found.append(row)
            print(json.dumps(row), flush=True)
    return found


@torch.no_grad()
def embeddings(model: Any, passages: Tensor) -> Tensor:
    from attngap.heads.forward import embedding, forward

    return torch.cat([embedding(forward(model, tokens)) for tokens in passages[:, None]])


@torch.no_grad()
def entropy(model: Any, passages: Tensor) -> Scores:
    """Mean entropy of a head's rows: those that spread over many keys are kept."""
    from attngap.heads.forward import forward
    from attngap.models.capture import Call, capture

    found: Scores = {}

    def watch(call: Call) -> None:
        k = call.k.repeat_interleave(call.heads // call.kv_heads, 1)
        log = (call.q @ k.mT * call.scale).log_softmax(-1)
        found.update({(call.layer, i): float(x) for i, x in enumerate(-(log.exp() * log).sum(-1).mean((0, 2)))})

    with capture(model, watch):
        forward(model, passages)
    return found


@torch.no_grad()
def ablation(model: Any, passages: Tensor, heads: list[tuple[int, int]]) -> Scores:
    """How far the embedding turns when a head is silenced."""
    from attngap.models.capture import Call, capture

    whole, found = embeddings(model, passages), {}
    for layer, head in heads:

        def silence(call: Call, layer: int = layer, head: int = head) -> Tensor | None:
            if call.layer != layer:
                return None
            return call.output.index_fill(1, torch.tensor([head]), 0.0)

        with capture(model, silence):
            found[layer, head] = float(1 - (embeddings(model, passages) * whole).sum(-1).mean())
    return found
