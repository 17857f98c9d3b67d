"""Our conversion and its parts, at every budget: other numbers of kept groups, other windows, other choices of heads.

One exact pass of the original over a context serves all of them: what a replaced group holds after it (window, sinks
and sums of features) comes from the keys and values of that pass, as kvpress' methods prune theirs behind it.
"Throughout" the converted model reads the context itself.
"""

import argparse
import copy
import dataclasses
import json
import random
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from asking import Answers, full_bytes
from contexts import contexts
from torch import Tensor

OURS, THROUGHOUT = "attngap", "attngap, throughout"
OUR_FORM_THEIR_HEADS, RANDOM = "our form, DuoAttention's heads", "our form, random heads"
WINDOW_FORM = "sinks + window, our heads"
WINDOW_ALL = "sinks + window, all heads, throughout"
LOLCATS = "LoLCATs-style, throughout"
WINDOW = 64  # of the replaced heads at a budget: chosen on other text, see docs/rivals.md
Group = tuple[int, int]  # layer, key head


@dataclasses.dataclass(frozen=True)
class Layer:
    """What one layer of the original read of a context."""

    k: Tensor
    v: Tensor
    rotary: Any


class Parts:
    """The fitted replacements of a conversion, and the original they are for."""

    def __init__(self, original: Any, mechanisms: Mapping[int, Any], window: int | None):
        self.original = original
        self.mechanisms = {layer: with_window(m, window) for layer, m in mechanisms.items()}
        config = original.config
        self.layers, self.groups = config.num_hidden_layers, config.num_key_value_heads
        self.dim = config.hidden_size // config.num_attention_heads

    def without_features(self) -> "Parts":
        from attngap.heads.replacement import window_only

        near = {i: window_only(m, m.window, m.sinks, relative=m.relative) for i, m in self.mechanisms.items()}
        return Parts(self.original, near, None)

    def convert(self, kept: Iterable[Group]) -> Any:
        from attngap.conversion.choose import convert

        per = self.original.config.num_attention_heads // self.groups
        heads = {(layer, head) for layer, g in kept for head in range(g * per, (g + 1) * per)}
        return convert(self.original, self.mechanisms, heads)

    def affordable(self, budget: float, tokens: int) -> int:
        """How many groups can keep everything at a share of the original's cache; negative where not even none can."""
        from attngap.models.cache import SPARE

        config = self.original.config
        states = sum(state_bytes(m) for m in self.mechanisms.values())
        untouched = (self.layers - len(self.mechanisms)) * self.groups
        group = 2 * 4 * self.dim * (tokens + SPARE)
        return int((budget * full_bytes(config, tokens) - states - untouched * group) // group)


def with_window(mechanism: Any, window: int | None) -> Any:
    """The same fitted features behind another window."""
    if window is None or mechanism.window == window:
        return mechanism
    other = copy.deepcopy(mechanism)
    other.window = window
    return other


def state_bytes(mechanism: Any) -> int:
    """Of one layer, counted on a real state."""
    tokens = mechanism.sinks + mechanism.window + 1
    k = torch.zeros(1, mechanism.kv_heads, tokens, mechanism.dim)
    v = torch.zeros(1, mechanism.kv_heads, tokens, mechanism.value_dim)
    turned = torch.zeros(1, tokens, mechanism.dim)
    state = mechanism.state_after(k, v, (turned, turned))
    return sum(x.numel() * x.element_size() for x in state.values())


@torch.no_grad()
def read_exactly(original: Any, tokens: list[int]) -> tuple[list[Layer], float]:
    """The keys and values of the original over a context, and the seconds it took."""
    from attngap.heads.forward import body_of
    from attngap.models.capture import capture

    found: list[Layer] = []
    body, start = body_of(original), time.perf_counter()
    with capture(body, lambda call: found.append(Layer(call.k, call.v, call.rotary))):
        body(input_ids=torch.tensor([tokens]), use_cache=False)
    return found, time.perf_counter() - start


@torch.no_grad()
def handed_over(converted: Any, layers: list[Layer]) -> Any:
    """The cache of a converted model after a context that the original has read."""
    from attngap.models.prefill import hand_over
    from attngap.models.swap import empty_cache, mixed_heads

    cache, parts = empty_cache(converted), mixed_heads(converted)
    for i, read in enumerate(layers):
        hand_over(cache, i, parts.get(i), read.k, read.v, read.rotary)
    return cache


@torch.no_grad()
def read_throughout(converted: Any, tokens: list[int]) -> tuple[Any, float]:
    from attngap.models.swap import empty_cache

    cache, start = empty_cache(converted), time.perf_counter()
    converted(input_ids=torch.tensor([tokens]), past_key_values=cache, use_cache=True, logits_to_keep=1)
    return cache, time.perf_counter() - start


def best(parts: Parts, scores: list[list[float]], count: int) -> list[Group]:
    """So many groups of those that have a replacement, the highest scores first."""
    can = [(layer, g) for layer in parts.mechanisms for g in range(parts.groups)]
    return sorted(can, key=lambda at: (-scores[at[0]][at[1]], at))[: max(0, count)]


def random_scores(layers: int, groups: int, seed: int) -> list[list[float]]:
    rng = random.Random(seed)
    return [[rng.random() for _ in range(groups)] for _ in range(layers)]


def read_scores(folder: Path, name: str) -> list[list[float]] | None:
    path = folder / f"{name}-scores.json"
    return json.loads(path.read_text())["groups"] if path.exists() else None


def load_parts(folder: Path, model: str, window: int | None) -> Parts:
    import attngap
    from attngap.models.swap import mixed_heads

    original, _ = attngap.load(folder / "model")
    converted, _ = attngap.load(model)
    return Parts(original.eval(), {i: part.mechanism for i, part in mixed_heads(converted).items()}, window)


def ours(options: argparse.Namespace) -> None:
    """Every part at every budget on every context of the wanted lengths that has no answers yet."""
    parts = load_parts(options.output, options.model, options.window)
    scores = {
        OURS: read_scores(options.output, "our"),
        OUR_FORM_THEIR_HEADS: read_scores(options.output, "duo"),
        RANDOM: random_scores(parts.layers, parts.groups, 0),
    }
    answers = Answers(options.output)
    wanted = [row for row in contexts(options.output) if row["length"] in options.lengths]
    for row in sorted(wanted, key=lambda row: (row["example"], options.lengths.index(row["length"]))):
        if row["example"] < options.examples:
            _context(parts, row, options.budgets, {name: s for name, s in scores.items() if s is not None}, answers)


def _context(parts: Parts, row: dict, budgets: list[float], scores: dict[str, Any], answers: Answers) -> None:
    near = parts.without_features()
    variants = [(name, parts, score) for name, score in scores.items()]
    if OURS in scores:
        variants.append((WINDOW_FORM, near, scores[OURS]))
    todo = [(name, part, score, answers.missing(name, budgets, row)) for name, part, score in variants]
    tokens, layers, seconds = row["context"], None, 0.0
    full = full_bytes(parts.original.config, len(tokens))
    for name, part, score, missing in todo:
        for budget in missing:
            count = part.affordable(budget, len(tokens))
            if count < 0:
                continue
            if layers is None:
                layers, seconds = read_exactly(parts.original, tokens)
            _ask(answers, name, budget, row, part.convert(best(part, score, count)), layers, full, seconds)
    for budget in answers.missing(THROUGHOUT, budgets[:1], row) if OURS in scores else ():
        count = parts.affordable(budget, len(tokens))
        if count >= 0:
            model = parts.convert(best(parts, scores[OURS], count))
            cache, took = read_throughout(model, tokens)
            _ask_cache(answers, THROUGHOUT, budget, row, model, cache, full, took)
    for budget in answers.missing(WINDOW_ALL, budgets, row):
        wide = int(budget * len(tokens)) - 4
        everywhere = Parts(parts.original, near.mechanisms, wide).convert([])
        cache, took = read_throughout(everywhere, tokens)
        _ask_cache(answers, WINDOW_ALL, budget, row, everywhere, cache, full, took)


def _ask(answers, name, budget, row, model, layers, full, seconds) -> None:
    start = time.perf_counter()
    cache = handed_over(model, layers)
    _ask_cache(answers, name, budget, row, model, cache, full, seconds + time.perf_counter() - start)


def _ask_cache(answers, name, budget, row, model, cache, full, seconds) -> None:
    from attngap.models.cache import cache_bytes

    share = cache_bytes(cache) / full
    answers.ask(name, budget, row, model, lambda: copy.deepcopy(cache), share, seconds)
