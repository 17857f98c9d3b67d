"""Our conversion and its parts, at every budget: other numbers of kept groups, other windows, other choices of heads.

One exact pass of the original over a context serves all of them: what a replaced group holds after it (window, sinks,
tokens that the context's last queries would miss most, and sums of features) comes from the keys and values of that
pass, as kvpress' methods prune theirs behind it. "Throughout" the converted model reads the context itself.
"""

import argparse
import copy
import dataclasses
import functools
import json
import random
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from asking import Answers, full_bytes, head_dim
from contexts import wanted
from heads import Scores, read_scores
from presses import ORIGINAL, as_cache

OURS, THROUGHOUT = "attngap", "attngap, throughout"
OUR_FORM_THEIR_HEADS, RANDOM = "our form, DuoAttention's heads", "our form, random heads"
ONE_WINDOW, WINDOW_FORM = "attngap, one window at all budgets", "sinks + window, our heads"
WINDOW_ALL = "sinks + window, all heads, throughout"
RECENT = "attngap, last tokens alone"  # no others are held
FORMS = "forms.json"
Group = tuple[int, int]  # layer, key head


class Parts:
    """The fitted replacements of a conversion, and the original they are for."""

    def __init__(self, original: Any, mechanisms: Mapping[int, Any], window: int | None, held: float = 0.0):
        """`held` is the share of the window's room that tokens from anywhere in a context get."""
        self.original, self.held = original, held
        self.mechanisms = {layer: with_window(m, window) for layer, m in mechanisms.items()}
        config = original.config
        self.layers, self.groups = config.num_hidden_layers, config.num_key_value_heads
        some = next(iter(self.mechanisms.values()))
        self.sinks, self.window = some.sinks, some.window
        self.dim = head_dim(config)

    def without_features(self) -> "Parts":
        from attngap.heads.replacement import window_only

        near = {i: window_only(m, m.window, m.sinks, relative=m.relative) for i, m in self.mechanisms.items()}
        return Parts(self.original, near, None, self.held)

    def cached(self) -> dict[int, Any]:
        """The replacements with the window and the sinks that their caches have after a long context."""
        from attngap.models.prefill import shared_room

        shared = {i: shared_room(m, self.held) for i, m in self.mechanisms.items()}
        return {i: narrow.with_sinks(narrow.sinks + more) for i, (narrow, more) in shared.items()}

    def convert(self, kept: Iterable[Group]) -> Any:
        from attngap.conversion.choose import convert

        per = self.original.config.num_attention_heads // self.groups
        heads = {(layer, head) for layer, g in kept for head in range(g * per, (g + 1) * per)}
        return convert(self.original, self.mechanisms, heads)

    def affordable(self, budget: float, tokens: int) -> int:
        """How many groups can keep everything at a share of the original's cache; negative where not even none can.

        A group that does needs no state.
        """
        from attngap.models.mixed_layer import SPARE

        held = [state_bytes(m) for m in self.cached().values()]
        state = held[0][0]
        untouched = (self.layers - len(self.mechanisms)) * self.groups
        group = 2 * 4 * self.dim * (tokens + SPARE)
        least = len(held) * self.groups * state + sum(shared for _, shared in held) + untouched * group
        return int((budget * full_bytes(self.original.config, tokens) - least) // (group - state))


class Form(NamedTuple):
    """Of all replaced groups of a conversion: how many tokens they hold, which share of these may be from anywhere, and
    whether they have features of the others."""

    window: int
    features: bool
    held: float = 0.0

    def of(self, parts: Parts) -> Parts:
        shaped = Parts(parts.original, parts.mechanisms, self.window, self.held)
        return shaped if self.features else shaped.without_features()


def chosen_form(folder: Path, length: int, budget: float, wanted: Callable[[Form], bool]) -> Form | None:
    """The best form at this length and budget, see forms.py; None where none was judged or none is small enough."""
    path = folder / FORMS
    found = json.loads(path.read_text()) if path.exists() else {}
    rows = found.get(str(length), {}).get(str(budget), [])
    forms = (Form(**{name: row[name] for name in Form._fields if name in row}) for row in rows)
    return next((form for form in forms if wanted(form)), None)


def with_window(mechanism: Any, window: int | None) -> Any:
    """The same fitted features behind another window, or all of its own room for last tokens."""
    window = getattr(mechanism, "room", None) if window is None else window
    if window is None or (mechanism.window == window and not mechanism.held):
        return mechanism
    return mechanism.with_window(window)


def widest(parts: Parts, budget: float, tokens: int) -> Parts:
    """Sinks and window in all groups, as wide as the budget allows."""
    window = int(budget * tokens) - parts.sinks
    while (shaped := Form(window, features=False).of(parts)).affordable(budget, tokens) < 0:
        window -= 1
    return shaped


def state_bytes(mechanism: Any) -> tuple[int, int]:
    """Of one key head of a layer, and of what its key heads share, counted on a real state as a cache holds it."""
    from attngap.mechanisms.held import hold

    tokens = mechanism.sinks + mechanism.window + 1
    k = torch.zeros(1, mechanism.kv_heads, tokens, mechanism.dim)
    v = torch.zeros(1, mechanism.kv_heads, tokens, mechanism.value_dim)
    turned = torch.zeros(1, tokens, mechanism.dim)
    state = hold(mechanism, mechanism.state_after(k, v, (turned, turned)), (turned, turned))
    sizes = {name: x.numel() * x.element_size() for name, x in state.items()}
    shared = sum(size for name, size in sizes.items() if name in ("cos", "sin", "count"))
    return (sum(sizes.values()) - shared) // mechanism.kv_heads, shared


@torch.no_grad()
def read_exactly(original: Any, tokens: list[int]) -> tuple[list[Any], float]:
    """What the layers of the original read of a context, and the seconds it took."""
    from attngap.heads.forward import body_of
    from attngap.models.capture import capture
    from attngap.models.prefill import Read

    found: list[Any] = []
    body, start = body_of(original), time.process_time()
    with capture(body, lambda call: found.append(Read.of(call))):
        body(input_ids=torch.tensor([tokens]), use_cache=False)
    return found, time.process_time() - start


@torch.no_grad()
def handed_over(converted: Any, layers: list[Any], held: float = 0.0) -> Any:
    """The cache of a converted model after a context that the original has read."""
    from attngap.models.mixed import mixed_heads
    from attngap.models.prefill import hand_over
    from attngap.models.swap import empty_cache

    cache, parts = empty_cache(converted), mixed_heads(converted)
    for i, read in enumerate(layers):
        hand_over(cache, i, parts.get(i), read, held)
    return cache


@torch.no_grad()
def read_throughout(converted: Any, tokens: list[int]) -> tuple[Any, float]:
    from attngap.models.swap import empty_cache

    cache, start = empty_cache(converted), time.process_time()
    converted(input_ids=torch.tensor([tokens]), past_key_values=cache, use_cache=True, logits_to_keep=1)
    return cache, time.process_time() - start


def best(parts: Parts, scores: Scores, count: int) -> list[Group]:
    """So many groups of those that have a replacement, the highest scores first."""
    can = [(layer, g) for layer in parts.mechanisms for g in range(parts.groups)]
    return sorted(can, key=lambda at: (-scores[at[0]][at[1]], at))[: max(0, count)]


def random_scores(layers: int, groups: int, seed: int) -> Scores:
    rng = random.Random(seed)
    return [[rng.random() for _ in range(groups)] for _ in range(layers)]


def our_scores(folder: Path) -> Callable[[int], Scores]:
    """Ours, by the window of the groups that are replaced."""

    def at(window: int) -> Scores:
        found = read_scores(folder, "our", window)
        if found is None:
            raise SystemExit("Scores of heads are needed first: python benchmarks/rivals scores")
        return found

    at(0)
    return at


def load_parts(folder: Path, model: str, window: int | None) -> Parts:
    import attngap
    from attngap.models.mixed import mixed_heads

    original, _ = attngap.load(folder / "model")
    converted, _ = attngap.load(model)
    return Parts(original.eval(), {i: part.mechanism for i, part in mixed_heads(converted).items()}, window)


def ours(options: argparse.Namespace) -> None:
    """Every part at every budget on every context of the wanted lengths that has no answers yet."""
    parts = load_parts(options.output, options.model, options.window)
    found = variants(parts, options)
    answers = Answers(options.output)
    for row in wanted(options):
        _handed_over(parts.original, row, options.budgets, found, answers)
        _throughout(parts, row, options, found.get(OURS), answers)


@dataclasses.dataclass(frozen=True)
class Variant:
    """A choice of heads, and the form of the others at a length and budget."""

    scores: Callable[[int], Scores]  # by the window of the others
    shaped: Callable[[int, float], Parts | None]

    def model(self, length: int, tokens: int, budget: float) -> tuple[Callable[[], Any], float] | None:
        """What makes the converted model, and the share of its windows' room for tokens from anywhere; None where
        nothing is small enough."""
        parts = self.shaped(length, budget)
        if parts is None or (count := parts.affordable(budget, tokens)) < 0:
            return None
        return lambda: parts.convert(best(parts, self.scores(parts.window), count)), parts.held


def variants(parts: Parts, options: argparse.Namespace) -> dict[str, Variant]:
    """Those that are wanted, by name."""
    folder, our = options.output, our_scores(options.output)

    def fitting(length: int, budget: float, wanted: Callable[[Form], bool] = lambda form: True) -> Parts | None:
        form = chosen_form(folder, length, budget, wanted)
        return None if form is None else form.of(parts)

    drawn = random_scores(parts.layers, parts.groups, 0)
    found = {
        OURS: Variant(our, fitting),
        RECENT: Variant(our, functools.partial(fitting, wanted=lambda form: form.features and not form.held)),
        RANDOM: Variant(lambda window: drawn, fitting),
        ONE_WINDOW: Variant(our, lambda length, budget: parts),
        WINDOW_FORM: Variant(our, functools.partial(fitting, wanted=lambda form: not (form.features or form.held))),
    }
    theirs = read_scores(folder, "duo")
    if theirs is not None:
        found[OUR_FORM_THEIR_HEADS] = Variant(lambda window: theirs, fitting)
    return {name: each for name, each in found.items() if not options.only or name in options.only}


def _handed_over(
    original: Any, row: dict, budgets: list[float], forms: Mapping[str, Variant], answers: Answers
) -> None:
    """Everything that goes on from one exact pass."""
    tokens, full = row["context"], full_bytes(original.config, len(row["context"]))
    todo = [
        (name, budget, *make)
        for name, variant in forms.items()
        for budget in answers.missing(name, budgets, row)
        if (make := variant.model(row["length"], len(tokens), budget)) is not None
    ]
    first = answers.missing(ORIGINAL, [None], row)
    if not (todo or first):
        return
    layers, seconds = read_exactly(original, tokens)
    if first:
        whole = [(layer.k, layer.v) for layer in layers]
        answers.ask(ORIGINAL, None, row, original, lambda: as_cache(whole), 1.0, seconds)
    for name, budget, make, held in todo:
        start = time.process_time()
        model = make()
        cache = handed_over(model, layers, held)
        _ask(answers, name, budget, row, model, cache, full, seconds + time.process_time() - start)


def _throughout(parts: Parts, row: dict, options: argparse.Namespace, our: Variant | None, answers: Answers) -> None:
    """Models that read the context as they are, at the first budget: each needs a pass of its own."""
    tokens, budget = row["context"], options.budgets[0]
    full = full_bytes(parts.original.config, len(tokens))
    made = None if our is None else our.model(row["length"], len(tokens), budget)
    models = {
        THROUGHOUT: None if made is None else made[0],
        WINDOW_ALL: lambda: widest(parts, budget, len(tokens)).convert([]),
    }
    for name, make in models.items():
        if make is None or (options.only and name not in options.only) or not answers.missing(name, [budget], row):
            continue
        model = make()
        cache, took = read_throughout(model, tokens)
        _ask(answers, name, budget, row, model, cache, full, took)


def converted(options: argparse.Namespace) -> None:
    """A converted folder as it comes, under `--name`, throughout; it stands beside others of the first budget."""
    import attngap

    model, _ = attngap.load(options.model)
    answers, budget = Answers(options.output), options.budgets[0]
    for row in wanted(options):
        if answers.missing(options.name, [budget], row):
            cache, took = read_throughout(model, row["context"])
            full = full_bytes(model.config, len(row["context"]))
            _ask(answers, options.name, budget, row, model, cache, full, took)


def _ask(
    answers: Answers, name: str, budget: float, row: dict, model: Any, cache: Any, full: int, seconds: float
) -> None:
    from attngap.models.cache import cache_bytes

    share = cache_bytes(cache) / full
    answers.ask(name, budget, row, model, lambda: copy.deepcopy(cache), share, seconds)
