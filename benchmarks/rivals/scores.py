"""Scores of heads: which groups should keep softmax? Each as a table of layers by groups, and the seconds it took.

What others propose is written here from their papers ("our reading of"); DuoAttention's quick scores are kvpress' own.
All read the calibration text and tasks made on the fly, none of the contexts that the table asks about.
"""

import argparse
import copy
import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from asking import Answers, full_bytes
from contexts import contexts
from conversions import Group, Parts, best, handed_over, load_parts, read_exactly
from gates import train_gates
from heads import Scores, read_scores, scores_path
from torch import Tensor

SIZES = (0.4, 0.2, 0.1, 0.05, 0.02)  # shares of groups left after each round of ours
TOKENS, ROWS, SEED = 4096, 256, 11  # of long passages, of a slice, of whatever is drawn
PROBED = 256  # tokens of key-value pairs
SHARES = (0.02, 0.05, 0.1, 0.25)
CHOICE = "choice: "
CHOICES = {"text": 1, "lookup": 0, "repetition": 0}  # which example of each kind judges a choice


def scores(options: argparse.Namespace) -> None:
    """Compute those that are wanted and not there yet."""
    parts = load_parts(options.output, options.model, options.window)
    for name in options.scores:
        path = scores_path(options.output, name, options.window)
        if path.exists():
            continue
        start = time.process_time()
        found = SCORES[name](parts, options.output)
        path.write_text(json.dumps({"groups": found, "seconds": time.process_time() - start}))
        print(name, f"{time.process_time() - start:.0f} s", flush=True)


def choices(options: argparse.Namespace) -> None:
    """How good is each choice? All others hold sinks and window only, so that nothing but the choice differs."""
    from attngap.models.cache import cache_bytes

    parts = load_parts(options.output, options.model, options.window).without_features()
    tables = {name: read_scores(options.output, name, parts.window) for name in (*SCORES, "duo")}
    for name in (name for name, table in tables.items() if table is None):
        step = "kvpress" if name == "duo" else f"scores --scores {name}"
        print(f"Scores {name} skipped: they are not there. python benchmarks/rivals {step} makes them")
    answers = Answers(options.output)
    for row in contexts(options.output):
        if row["length"] not in options.lengths or row["example"] != CHOICES[row["kind"]]:
            continue
        layers, seconds = None, 0.0
        for name, table in tables.items():
            if table is None:
                continue
            for share in answers.missing(CHOICE + name, SHARES, row):
                if layers is None:
                    layers, seconds = read_exactly(parts.original, row["context"])
                count = round(share * parts.layers * parts.groups)
                model = parts.convert(best(parts, table, count))
                cache = handed_over(model, layers)
                held = cache_bytes(cache) / full_bytes(parts.original.config, len(row["context"]))
                answers.ask(CHOICE + name, share, row, model, lambda cache=cache: copy.deepcopy(cache), held, seconds)


def tokenizer_of(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder / "model")


def slices(
    original: Any,
    tokenizer: Any,
    window: int,
    *,
    facts: int = TOKENS,
    text: int = TOKENS // 4,
    seed: int = SEED,
    asking: Callable[[int, Any, slice], None] = lambda layer, seen, before: None,
) -> list[Any]:
    """Ends of a long text whose numbers are asked for, of a sequence repeated beyond the window, and of a text.

    `asking` is shown what each layer read of each, and where the slice's past is.
    """
    from attngap.conversion.calibration import FactsPassage, repeats
    from attngap.conversion.slices import Slice, read_past
    from attngap.heads.passages import passages

    hay = passages(tokenizer, None, context=facts, count=1, seed=seed)
    numbers = FactsPassage.make(tokenizer, hay, seed=seed).tokens
    beyond = max(ROWS, window)
    repeated = repeats(tokenizer, context=max(TOKENS // 4, 5 * beyond // 2), beyond=beyond, seed=seed)
    plain = passages(tokenizer, None, context=text, count=1, split="heldout", seed=seed)
    found = []
    for tokens in (numbers, repeated, plain):
        start = tokens.shape[1] - ROWS
        past = read_past(original, tokens, lambda layer, seen, start=start: asking(layer, seen, slice(start)))
        found.append(Slice(past, start, start + ROWS))
    return found


def reference_of(parts: Parts, folder: Path, count: int = 3) -> Any:
    """The first of the slices, and what the original says of them."""
    from attngap.conversion.slices import SliceReference

    pieces = slices(parts.original, tokenizer_of(folder), parts.window)[:count]
    return SliceReference(parts.original, parts.mechanisms, pieces)


def by_group(parts: Parts, heads: Mapping[tuple[int, int], float]) -> dict[Group, float]:
    per = parts.original.config.num_attention_heads // parts.groups
    found: dict[Group, float] = {}
    for (layer, head), value in heads.items():
        found[layer, head // per] = found.get((layer, head // per), 0.0) + value
    return found


def heads_of(parts: Parts, groups: Sequence[Group]) -> frozenset[tuple[int, int]]:
    per = parts.original.config.num_attention_heads // parts.groups
    return frozenset((layer, head) for layer, g in groups for head in range(g * per, (g + 1) * per))


def as_table(parts: Parts, values: Mapping[Group, float]) -> Scores:
    """Groups that a conversion left whole stay so whatever the score."""
    return [[values.get((layer, g), float("inf")) for g in range(parts.groups)] for layer in range(parts.layers)]


def damage(parts: Parts, folder: Path) -> Scores:
    """Ours in one go: what replacing each head alone would do, to second order (docs/theory.md 5.1), on slices."""
    reference = reference_of(parts, folder)
    return as_table(parts, by_group(parts, reference.head_damage()))


def ours(parts: Parts, folder: Path) -> Scores:
    """As a conversion chooses: the damage first, then round by round what softmax gains the model as it is."""
    reference = reference_of(parts, folder)
    gains = lambda kept: by_group(parts, reference.softmax_gains(heads_of(parts, kept))[0])  # noqa: E731
    return as_table(parts, ranks(by_group(parts, reference.head_damage()), gains))


def ranks(
    first: Mapping[Group, float], gains: Callable[[Sequence[Group]], Mapping[Group, float]]
) -> dict[Group, float]:
    """Who was dropped when, as a score: those left to the end have the highest."""
    left, values, dropped = list(first), dict(first), []
    for share in SIZES:
        left.sort(key=lambda group: values[group], reverse=True)
        size = max(1, round(share * len(first)))
        dropped, left = left[size:] + dropped, left[:size]
        values = dict(gains(left))
    left.sort(key=lambda group: values[group], reverse=True)
    return {group: float(len(first) - place) for place, group in enumerate(left + dropped)}


@torch.no_grad()
def entropy(parts: Parts, folder: Path) -> Scores:
    """Mean entropy of a head's rows: those that spread over many keys are kept."""
    from attngap.heads.forward import body_of
    from attngap.heads.passages import passages
    from attngap.models.capture import Call, capture

    tokens = passages(tokenizer_of(folder), None, context=1024, count=1, split="heldout", seed=SEED)
    found: Scores = []

    def watch(call: Call) -> None:
        per, rows = [], call.q.shape[2] - ROWS
        for g in range(call.kv_heads):
            heads = slice(g * call.heads // call.kv_heads, (g + 1) * call.heads // call.kv_heads)
            per.append(float(row_entropy(call.q[0, heads, rows:], call.k[0, g], call.scale, rows).mean()))
        found.append(per)

    body = body_of(parts.original)
    with capture(body, watch):
        body(input_ids=tokens, use_cache=False)
    return found


def row_entropy(q: Tensor, k: Tensor, scale: float, first: int) -> Tensor:
    """Entropy in nats of causal softmax rows, the first of them at position `first`; q is (h, n, d), k is (t, d)."""
    logits = q @ k.T * scale
    may = torch.arange(k.shape[0]) <= torch.arange(first, first + q.shape[1])[:, None]
    log = logits.masked_fill(~may, -torch.inf).log_softmax(-1)
    return -(log.exp() * log.masked_fill(~may, 0.0)).sum(-1)


def probe(tokenizer: Any, length: int, seed: int) -> tuple[Tensor, Tensor]:
    """Key-value pairs, then some of the keys again with their values: the tokens, and which of them are asked for."""
    from attngap.heads.passages import language_reference
    from attngap.longcontext.suite import make
    from attngap.longcontext.tasks import task

    made = make(task("lookup"), tokenizer, "\n\n".join(language_reference())[:200_000], length, f"probe/{seed}")
    tokens, asked = made.context[0].tolist(), [False] * made.context.shape[1]
    for question in made.questions:
        tokens += [*question.ask, *question.answer]
        asked += [False] * len(question.ask) + [True] * len(question.answer)
    return torch.tensor([tokens]), torch.tensor(asked)


@torch.no_grad()
def ablation(parts: Parts, folder: Path) -> Scores:
    """Our reading of arXiv 2602.11374: how much of the answers to a key-value probe goes when a group is silenced."""
    tokens, asked = probe(tokenizer_of(folder), PROBED, SEED)
    model, per = parts.original, parts.original.config.num_attention_heads // parts.groups
    whole = answered(model, tokens, asked, None, per)
    return [
        [whole - answered(model, tokens, asked, (layer, g), per) for g in range(parts.groups)]
        for layer in range(parts.layers)
    ]


@torch.no_grad()
def answered(model: Any, tokens: Tensor, asked: Tensor, silenced: Group | None, per: int) -> float:
    """Mean log-probability of the answers with one group's output set to zero."""
    from attngap.models.capture import Call, capture

    def silence(call: Call) -> Tensor | None:
        if silenced is None or call.layer != silenced[0]:
            return None
        out = call.output.clone()
        out[:, silenced[1] * per : (silenced[1] + 1) * per] = 0
        return out

    with capture(model, silence):
        logits = model(input_ids=tokens, use_cache=False).logits[0]
    found = logits[:-1].log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]
    return float(found[asked[1:]].mean())


@torch.no_grad()
def layers(parts: Parts, folder: Path) -> Scores:
    """Our reading of arXiv 2512.20569: layers by the divergence when all heads of one are replaced, once fitted."""
    from attngap.conversion.joint import geometric_mean

    reference = reference_of(parts, folder, 2)
    every = {(layer, head) for layer, m in parts.mechanisms.items() for head in range(m.heads)}
    found = {}
    for layer in parts.mechanisms:
        lost = geometric_mean(reference.divergence(frozenset(at for at in every if at[0] != layer)))
        found |= {(layer, g): lost for g in range(parts.groups)}
    return as_table(parts, found)


def gates(parts: Parts, folder: Path) -> Scores:
    """Our reading of DuoAttention's training (arXiv 2410.10819; FlashMorph, 2606.30562, gates layers likewise).

    One gate a group mixes full attention with sinks and window; the distance of what the model makes of the answers to
    numbers stated long ago, plus a price on open gates, is brought down. The model itself is not trained.
    """
    pieces = slices(parts.original, tokenizer_of(folder), parts.window)[:2]
    near = next(iter(parts.mechanisms.values()))
    found = train_gates(parts.original, list(parts.mechanisms), pieces, near.window, near.sinks)
    return as_table(parts, {(layer, g): x for layer, each in found.items() for g, x in enumerate(each)})


def at_random(parts: Parts, folder: Path) -> Scores:
    rng = random.Random(SEED)
    return [[rng.random() for _ in range(parts.groups)] for _ in range(parts.layers)]


SCORES: dict[str, Callable[[Parts, Path], Scores]] = {
    "our": ours,
    "damage": damage,
    "entropy": entropy,
    "ablation": ablation,
    "layers": layers,
    "gates": gates,
    "random": at_random,
}
