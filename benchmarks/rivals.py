"""A converted model against cache compression at the same number of bytes, on the same tokens.

    attngap linearize smollm2 --keep 0.1 -o fast
    python benchmarks/rivals.py prepare smollm2 --text novel.txt --lengths 2048,4096 -o rivals
    python benchmarks/rivals.py ours fast -o rivals
    python -m venv kvpress && kvpress/bin/pip install torch==2.13.0
    kvpress/bin/pip install kvpress "transformers<5.3"
    kvpress/bin/python benchmarks/rivals.py kvpress -o rivals
    python benchmarks/rivals.py table -o rivals > docs/rivals.md

kvpress needs an older transformers, hence an environment of its own; this file runs in both. Contexts are compressed
before any question is known. Every finished item is a line of a file, so a stopped run goes on where it stopped. The
text should be of a kind that no conversion was fitted to or chosen on.
"""

import argparse
import copy
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

CONTINUED = 256  # tokens of real text after the context, whose predictions are compared
DUO_NEAR = 128 + 256  # sinks and recent tokens of kvpress' DuoAttention
TASKS = ("needle", "needles", "lookup", "repetition", "copying", "dictionary")  # those the original solves in part


def prepare(options: argparse.Namespace) -> None:
    """Contexts, questions and text as plain tokens, and the model as a plain folder."""
    import attngap
    from attngap.longcontext.suite import make
    from attngap.longcontext.tasks import task

    model, tokenizer = attngap.load(options.model)
    model.save_pretrained(options.output / "model")
    tokenizer.save_pretrained(options.output / "model")
    text = options.text.read_text(encoding="utf-8")
    (options.output / "text.txt").write_text(text, encoding="utf-8")
    words = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    rows = []
    for length in options.lengths:
        for i in range(options.examples):
            start = (i + 1) * (len(words) - length) // (options.examples + 1)
            body = words[start : start + length]
            rows.append({"task": "text", "context": body[:-CONTINUED], "questions": [[body[-CONTINUED:], []]]})
            for name in TASKS:
                made = make(task(name), tokenizer, text, length, f"rivals/{name}/{length}/{i}")
                questions = [[list(q.ask), list(q.answer)] for q in made.questions]
                rows.append({"task": name, "context": made.context[0].tolist(), "questions": questions})
            for row in rows[-1 - len(TASKS) :]:
                row |= {"length": length, "example": i}
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (options.output / "examples.jsonl").write_text(lines, encoding="utf-8")


def ours(options: argparse.Namespace) -> None:
    """The original, the converted model, and the same kept heads with sinks and window alone (DuoAttention's form)."""
    import attngap
    from attngap.conversion.evaluate import baselines
    from attngap.conversion.receipt import WINDOW

    original, _ = attngap.load(options.output / "model")
    converted, _ = attngap.load(options.model)
    window = baselines(original, converted, seed=0)[WINDOW]
    models = {"original": original, "attngap": converted, "the same heads, sinks and window": window}
    for name, model in models.items():
        run(options.output, name, original, lambda cache, row, model=model: read(model, cache, row), model)


def kvpress(options: argparse.Namespace) -> None:
    """kvpress' methods at the share of the cache that the converted model takes at each length."""
    import kvpress
    from kvpress.presses import duo_attention_press
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(options.output / "model", dtype=torch.float32).eval()
    text = (options.output / "text.txt").read_text(encoding="utf-8")
    duo_attention_press.load_dataset = lambda *args, **kwargs: _Chapters(text)  # its own needs a hub
    shares = {row["length"]: row["share"] for row in results(options.output) if row["method"] == "attngap"}
    presses: dict[str, Callable[[float, int], Any]] = {
        "StreamingLLM": lambda share, _: kvpress.StreamingLLMPress(1 - share),
        "SnapKV": lambda share, _: kvpress.SnapKVPress(1 - share),
        "ExpectedAttention": lambda share, _: kvpress.ExpectedAttentionPress(1 - share),
        "KVzip": lambda share, _: kvpress.KVzipPress(1 - share),
        "DuoAttention, scored on the fly": lambda share, length: kvpress.DuoAttentionPress(
            min(1.0, (1 - share) / (1 - DUO_NEAR / length)), on_the_fly_scoring=True
        ),
    }
    for name, make in presses.items():

        def prefill(cache: Any, row: dict, make=make) -> float:
            press = make(shares[row["length"]], len(row["context"]))
            read(model, cache, row, press(model))
            return shares[row["length"]]

        run(options.output, name, model, prefill, model)


class _Chapters:
    """What DuoAttention's scoring asks of a data set, from a text of one's own."""

    def __init__(self, text: str):
        self.text = text

    def to_pandas(self) -> "_Chapters":
        return self

    def sample(self, count: int, random_state: int) -> dict[str, Any]:
        size = 2500  # characters: its mean queries and keys need no long passages
        pieces = [self.text[i : i + size] for i in range(0, len(self.text) - size, size)]
        step = max(1, len(pieces) // count)
        return {"chapter": _Listed(pieces[::step][:count])}


class _Listed(list):
    def tolist(self) -> list[str]:
        return list(self)


@torch.no_grad()
def read(model: Any, cache: Any, row: dict, within: Any = None) -> float:
    """Prefill; the share of the original's cache that is held after it."""
    with within or nullcontext():
        model(input_ids=torch.tensor([row["context"]]), past_key_values=cache, use_cache=True, logits_to_keep=1)
    config = model.config
    full = 2 * 4 * len(row["context"]) * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return held(cache) / full


def held(cache: Any) -> int:
    try:
        from attngap.models.cache import cache_bytes
    except ImportError:
        return sum(x.numel() * x.element_size() for layer in cache.layers for x in (layer.keys, layer.values))
    return cache_bytes(cache)


@torch.no_grad()
def run(folder: Path, method: str, original: Any, prefill: Callable[[Any, dict], float], model: Any) -> None:
    """Answer every question of every context, each from a copy of the cache as it was after the context."""
    from transformers import DynamicCache

    done = {(row["method"], row["task"], row["length"], row["example"]) for row in results(folder)}
    for row in examples(folder):
        key = {name: row[name] for name in ("task", "length", "example")}
        if (method, *key.values()) in done:
            continue
        cache, start = DynamicCache(config=model.config), time.perf_counter()
        share = prefill(cache, row)
        seconds = time.perf_counter() - start
        scores = []
        for ask, answer in row["questions"]:
            tokens = torch.tensor([[*ask, *answer]])
            place = torch.arange(len(row["context"]), len(row["context"]) + tokens.shape[1])[None]
            logits = model(input_ids=tokens, past_key_values=copy.deepcopy(cache), position_ids=place).logits[0]
            scores.append(score(logits, tokens[0], len(answer), lambda row=row: truth(folder, original, row)))
        line = key | {"method": method, "share": share, "seconds": seconds, "scores": scores}
        with (folder / "results.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(method, key, [round(x, 3) for x in scores], f"{share:.0%} {seconds:.1f} s", flush=True)


def score(logits: torch.Tensor, tokens: torch.Tensor, answer: int, teacher: Callable[[], torch.Tensor]) -> float:
    """Share of the answer's tokens predicted; of text, where there is no answer, the divergence in nats per token."""
    if answer:
        return float((logits[-answer - 1 : -1].argmax(-1) == tokens[-answer:]).float().mean())
    theirs, ours = teacher().float().log_softmax(-1), logits.float().log_softmax(-1)
    return float((theirs.exp() * (theirs - ours)).sum(-1).mean())


@torch.no_grad()
def truth(folder: Path, original: Any, row: dict) -> torch.Tensor:
    """The original's logits for the text, computed once and kept on disk."""
    path = folder / f"original-{row['length']}-{row['example']}.pt"
    if not path.exists():
        whole = torch.tensor([[*row["context"], *row["questions"][0][0]]])
        torch.save(original(input_ids=whole, use_cache=False, logits_to_keep=CONTINUED).logits[0], path)
    return torch.load(path, weights_only=True)


def examples(folder: Path) -> Iterator[dict]:
    with (folder / "examples.jsonl").open(encoding="utf-8") as file:
        yield from map(json.loads, file)


def results(folder: Path) -> list[dict]:
    path = folder / "results.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def table(options: argparse.Namespace) -> None:
    """Mean over contexts; recall is the mean over tasks, with the half-width of its 95% interval."""
    rows = results(options.output)
    for length in sorted({row["length"] for row in rows}):
        print(f"\n## {length:,} tokens\n")
        print("| method | cache | KL, nats per token |", *(f"{name} |" for name in TASKS), "recall | prefill, s |")
        print("|---|---|---|", *("---|" for _ in TASKS), "---|---|")
        for method in dict.fromkeys(row["method"] for row in rows):
            mine = [row for row in rows if row["method"] == method and row["length"] == length]
            by_task = {
                name: [x for row in mine if row["task"] == name for x in row["scores"]] for name in ("text", *TASKS)
            }
            if not all(by_task.values()):
                continue
            means = [statistics.mean(by_task[name]) for name in TASKS]
            count = sum(len(by_task[name]) for name in TASKS)
            recall = statistics.mean(means)
            reach = 1.96 * math.sqrt(max(recall * (1 - recall), 0.25 / count) / count)
            cells = [f"{statistics.mean(row['share'] for row in mine):.0%}", f"{statistics.mean(by_task['text']):.4f}"]
            cells += [f"{mean:.0%}" for mean in means] + [f"{recall:.0%} ± {reach:.0%}"]
            print(f"| {method} |", *(f"{cell} |" for cell in cells), f"{min(row['seconds'] for row in mine):.1f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("prepare", "ours", "kvpress", "table"))
    parser.add_argument("model", nargs="?", help="prepare: the original; ours: a converted folder")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--lengths", type=lambda text: [int(x) for x in text.split(",")], default=[2048, 4096])
    parser.add_argument("--examples", type=int, default=3)
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    torch.set_grad_enabled(False)
    globals()[options.step](options)


if __name__ == "__main__":
    main()
