"""Does a plan know what its conversion will lose?

    python benchmarks/prediction.py -o checked.json                              SmolLM2
    python benchmarks/prediction.py -o checked.json --model small                a decoder that is trained here first
    python benchmarks/prediction.py checked.json ...                             what several such runs come to

Each run diagnoses the model (without floors), and then measures plans of several shares and granularities: all heads
that a plan does not keep are replaced, by the replacements that the diagnosis fitted, on held-out text and on repeated
random tokens that the diagnosis has not seen. `attngap linearize`, which fits longer and trades heads, is not run.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch
from scipy.stats import spearmanr

import attngap.diagnosis.diagnose as diagnosing
from attngap.diagnosis.joint import compare
from attngap.diagnosis.replaced import predictions, replaced_predictions
from attngap.heads.forward import forward
from attngap.heads.passages import language_reference, passages, stress
from attngap.models.load import load

PLANS = ((0.0, "group"), (0.03, "group"), (0.1, "group"), (0.3, "group"), (0.06, "head"), (0.2, "head"))
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


def check(model, tokenizer, *, window: int, context: int, seed: int, count: int) -> list[dict]:
    """Diagnose, then measure every plan while the fitted replacements are at hand."""
    texts = passages(tokenizer, context=context, count=count, seed=1000 + seed, split="heldout").split(1)
    repeats = [stress(tokenizer, context=context, seed=2000 + seed + i, period=2 * window) for i in range(count)]
    sequences = [(tokens, None) for tokens in texts] + repeats
    rows = []
    measure_together = diagnosing.measure_together

    @torch.no_grad()
    def measure_plans(run, result):
        result.joint = measure_together(run, result)
        before = [predictions(forward(model, tokens)) for tokens, _ in sequences]
        for share, granularity in PLANS:
            plan = result.plan(share, granularity)
            point = next(point for point in plan.curve if point.kept == len(plan.keep))
            heads = {layer: [h for at, h in plan.replaced() if at == layer] for layer in range(run.shape.layers)}
            found = []
            for (tokens, period), exact in zip(sequences, before, strict=True):
                piece = compare(exact, replaced_predictions(run, tokens, heads), tokens, period)
                found.append({name: float(value) for name, value in piece.items()})
            rows.append(_row(share, granularity, point, found[:count], found[count:]))
            print(json.dumps(rows[-1]), flush=True)
        return result.joint

    diagnosing.measure_together = measure_plans
    try:
        options = {"context": context, "window": window, "seed": seed, "passages": count, "ranks": ()}
        result = diagnosing.diagnose(model, tokenizer, **options, quiet=True)
    finally:
        diagnosing.measure_together = measure_together
    print(json.dumps({"seconds": result.seconds, "joint": [row.model_dump() for row in result.joint]}), flush=True)
    return rows


def _row(share: float, granularity: str, point, text: list[dict], recall: list[dict]) -> dict:
    mean = lambda rows, name: sum(row[name] for row in rows) / len(rows)  # noqa: E731
    row = {"share": share, "granularity": granularity, "kept": point.kept}
    row["divergence"] = mean(text, "divergence")
    row["perplexity_ratio"] = float(torch.tensor(mean(text, "log_ratio")).exp())
    original = mean(recall, "original")
    row["original"], row["recalled"] = original, mean(recall, "recalled") / original if original else None
    for name in ("perplexity_ratio", "recalled"):
        expected = getattr(point, name)
        row[f"predicted_{name}"] = None if expected is None else expected.model_dump()
    return row


def summarize(paths: list[Path]) -> None:
    """Share of measurements inside their interval, and the rank correlation over plans."""
    rows = [row | {"run": path.stem} for path in paths for row in json.loads(path.read_text())["plans"]]
    for name in ("perplexity_ratio", "recalled"):
        pairs = [(row[name], row[f"predicted_{name}"], row) for row in rows if row[f"predicted_{name}"] and row[name]]
        inside = sum(expected["low"] <= value <= expected["high"] for value, expected, _ in pairs)
        order = spearmanr([value for value, _, _ in pairs], [expected["value"] for _, expected, _ in pairs])
        print(f"{name}: {inside} of {len(pairs)} inside, rank correlation {order[0]:.3f}")
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
    asked = parser.parse_args()
    if asked.results:
        summarize(asked.results)
        return
    model, tokenizer = small(asked.seed) if asked.model == "small" else load(asked.model)
    options = {"window": asked.window, "context": asked.context, "seed": asked.seed, "count": asked.passages}
    rows = check(model, tokenizer, **options)
    asked.output.write_text(json.dumps({"model": asked.model, "options": options, "plans": rows}, indent=1))


if __name__ == "__main__":
    main()
