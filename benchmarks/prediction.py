"""Does a plan know what its conversion will lose, and is the damage of single heads right in size?

    python benchmarks/prediction.py -o checked.json                              SmolLM2
    python benchmarks/prediction.py -o checked.json --conversion fast            and a conversion that was made before
    python benchmarks/prediction.py -o checked.json --model small --convert      a decoder that is trained here first
    python benchmarks/prediction.py checked.json ...                             what several such runs come to

Each run diagnoses the model (without floors), and then measures plans of several shares and granularities: all heads
that a plan does not keep are replaced, by the replacements that the diagnosis fitted, on held-out text and on repeated
random tokens that the diagnosis has not seen. With `--convert` every plan is also converted by `attngap.linearize`,
which fits longer and trades heads. On the same passages some heads are replaced one at a time: the worst ten, and a
sample of the others weighted up, so that the sum of the estimates can be held against the real one.
"""

import argparse
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from scipy.stats import spearmanr
from torch import Tensor

import attngap.diagnosis.diagnose as diagnosing
from attngap.conversion.linearize import linearize
from attngap.conversion.receipt import Receipt
from attngap.diagnosis.joint import compare
from attngap.diagnosis.replaced import predictions, replaced_predictions, replacement_losses
from attngap.heads.forward import forward
from attngap.heads.passages import language_reference, passages, stress
from attngap.models.load import load

PLANS = ((0.0, "group"), (0.03, "group"), (0.1, "group"), (0.3, "group"), (0.06, "head"), (0.2, "head"))
FIGURES = ("perplexity_ratio", "recalled")
CALIBRATION = 12  # passages that a conversion of a plan is fitted to
WORST, SAMPLED = 10, 8  # heads replaced one at a time, and those of the rest that stand for it
STEPS, BATCH, LENGTH = 1500, 8, 256  # of the small decoder's training


def small(seed: int):
    """Four layers of eight heads, trained on the language reference and on repeated random tokens, half and half."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    inner.train_from_iterator(language_reference(), trainers.BpeTrainer(vocab_size=1024, show_progress=False))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 4}
    torch.manual_seed(seed)
    config = LlamaConfig(**sizes, vocab_size=len(tokenizer), max_position_embeddings=1024)
    model = LlamaForCausalLM(config)
    text = passages(tokenizer, context=LENGTH, count=400, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=STEPS)
    dice = random.Random(seed)
    for step in range(STEPS):
        rows = text[torch.randint(len(text), (BATCH,))]
        for row in range(BATCH // 2):
            period = dice.randint(8, LENGTH // 2)
            once = torch.randint(len(tokenizer), (period,))
            rows[row] = once.repeat(-(-LENGTH // period))[:LENGTH]
        loss = model(rows, labels=rows).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 250 == 249:
            print(f"trained {step + 1} steps, loss {loss:.2f}", flush=True)
    return model.eval(), tokenizer


def check(
    model,
    tokenizer,
    *,
    window: int,
    context: int,
    seed: int,
    count: int,
    convert: bool = False,
    made: Sequence[Any] = (),
) -> dict[str, Any]:
    """Diagnose, then measure every plan and some single heads while the fitted replacements are at hand."""
    texts = passages(tokenizer, context=context, count=count, seed=1000 + seed, split="heldout").split(1)
    repeats = [stress(tokenizer, context=context, seed=2000 + seed + i, period=2 * window) for i in range(count)]
    sequences = [(tokens, None) for tokens in texts] + repeats
    before: list[Tensor] = []
    rows, plans, sums = [], [], {}
    measure_together = diagnosing.measure_together

    def measured(predict: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        found = []
        for (tokens, period), exact in zip(sequences, before, strict=True):
            piece = compare(exact, predict(tokens), tokens, period)
            found.append({name: float(value) for name, value in piece.items()})
        return _means(found[:count], found[count:])

    @torch.no_grad()
    def measure_plans(run, result):
        result.joint = measure_together(run, result)
        before.extend(predictions(forward(model, tokens)) for tokens, _ in sequences)
        for share, granularity in PLANS:
            plan = result.plan(share, granularity)
            heads = {layer: [h for at, h in plan.replaced() if at == layer] for layer in range(run.shape.layers)}
            found = measured(lambda tokens, heads=heads: replaced_predictions(run, tokens, heads))
            rows.append({"share": share, "granularity": granularity, **_predicted(plan), **found})
            plans.append(plan)
            print(json.dumps(rows[-1]), flush=True)
        for kind, (tokens, _) in (("text", sequences[0]), ("recall", sequences[count])):
            sums[kind] = single_heads(run, result.heads, kind, tokens, seed)
            print(json.dumps({kind: sums[kind]}), flush=True)
        return result.joint

    diagnosing.measure_together = measure_plans
    try:
        options = {"context": context, "window": window, "seed": seed, "passages": count, "ranks": ()}
        result = diagnosing.diagnose(model, tokenizer, **options, quiet=True)
    finally:
        diagnosing.measure_together = measure_together
    for plan, row in zip(plans, rows, strict=True) if convert else ():
        options = {"context": context, "tokens": CALIBRATION * context, "seed": seed, "length": context}
        other = linearize(model, tokenizer, plan, **options, measured=False, quiet=True)[0]
        row["converted"] = _of(measured, other)
        print(json.dumps(row), flush=True)
    for other, receipt in made:
        nearest = min(plans, key=lambda plan: abs(len(plan.keep) - receipt.kept))
        found = {"converted": _of(measured, other), "share": receipt.kept / receipt.heads, "granularity": "group"}
        rows.append(_predicted(nearest) | found)
        print(json.dumps(rows[-1]), flush=True)
    print(json.dumps({"seconds": result.seconds, "joint": [row.model_dump() for row in result.joint]}), flush=True)
    return {"plans": rows, "single": sums}


@torch.no_grad()
def _of(measured: Callable, model: Any) -> dict[str, Any]:
    return measured(lambda tokens: predictions(forward(model, tokens)))


def single_heads(run: Any, heads: Sequence[Any], kind: str, tokens: Tensor, seed: int) -> dict[str, Any]:
    """The estimated and the real damage of single heads, summed over all of them; and how well the order agrees."""
    name = "damage" if kind == "text" else "recall_damage"
    able = [head for head in heads if getattr(head, name) is not None]
    able.sort(key=lambda head: -getattr(head, name))
    others = able[WORST:]
    drawn = random.Random(seed).sample(others, min(SAMPLED, len(others)))
    tried = able[:WORST] + drawn
    real = replacement_losses(run, f"checked-{kind}", tokens, tried, lambda *args, **kwargs: None)
    weights = [1.0] * len(able[:WORST]) + [len(others) / max(1, len(drawn))] * len(drawn)
    estimates = [getattr(head, name) for head in tried]
    summed = sum(weight * loss for weight, loss in zip(weights, real, strict=True))
    order = spearmanr(estimates, real)[0]
    return {"heads": len(tried), "estimated": sum(getattr(head, name) for head in able), "real": summed, "order": order}


def _means(text: list[dict], recall: list[dict]) -> dict[str, Any]:
    mean = lambda rows, name: sum(row[name] for row in rows) / len(rows)  # noqa: E731
    original = mean(recall, "original")
    return {
        "divergence": mean(text, "divergence"),
        "perplexity_ratio": float(torch.tensor(mean(text, "log_ratio")).exp()),
        "original": original,
        "recalled": mean(recall, "recalled") / original if original else None,
    }


def _predicted(plan: Any) -> dict[str, Any]:
    point = next(point for point in plan.curve if point.kept == len(plan.keep))
    found = {name: getattr(point, name) for name in FIGURES}
    return {"kept": point.kept} | {f"predicted_{name}": x and x.model_dump() for name, x in found.items()}


def summarize(paths: list[Path]) -> None:
    """Share of measurements inside their interval, the rank correlation over plans, and sums of single heads."""
    runs = {path.stem: json.loads(path.read_text()) for path in paths}
    rows = [row | {"run": name} for name, run in runs.items() for row in run["plans"]]
    for name in FIGURES:
        show(f"{name}, replaced as the diagnosis fitted", name, rows)
        show(f"{name}, converted", name, [row | row["converted"] for row in rows if "converted" in row])
    for name, run in runs.items():
        for kind, found in run["single"].items():
            ratio = found["estimated"] / found["real"]
            print(
                f"{name}, {kind}: {found['heads']} heads, sum {ratio:.2f} of the real one, order {found['order']:.2f}"
            )


def show(title: str, name: str, rows: list[dict]) -> None:
    pairs = [
        (row[name], row[f"predicted_{name}"], row)
        for row in rows
        if row[f"predicted_{name}"] and row.get(name) is not None
    ]
    if not pairs:
        return
    inside = sum(expected["low"] <= value <= expected["high"] for value, expected, _ in pairs)
    order = spearmanr([value for value, _, _ in pairs], [expected["value"] for _, expected, _ in pairs])
    print(f"{title}: {inside} of {len(pairs)} inside, rank correlation {order[0]:.3f}")
    for value, expected, row in pairs:
        span = f"{expected['value']:.3f} ({expected['low']:.3f} to {expected['high']:.3f})"
        print(f"  {row['run']:20} {row['share']:4.0%} {row['granularity']:5} measured {value:.3f} predicted {span}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="*")
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--passages", type=int, default=4)
    parser.add_argument("--convert", action="store_true", help="also convert every plan")
    parser.add_argument("--conversion", action="append", default=[], help="a converted folder to hold beside")
    asked = parser.parse_args()
    if asked.results:
        summarize(asked.results)
        return
    model, tokenizer = small(asked.seed) if asked.model == "small" else load(asked.model)
    options = {"window": asked.window, "context": asked.context, "seed": asked.seed, "count": asked.passages}
    made = [(load(folder)[0], Receipt.load(folder)) for folder in asked.conversion]
    found = check(model, tokenizer, **options, convert=asked.convert, made=made)
    asked.output.write_text(json.dumps({"model": asked.model, "options": options, **found}, indent=1))


if __name__ == "__main__":
    main()
