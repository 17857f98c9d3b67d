"""Sizes that people have: half precision against single, and seconds and memory against the number of parameters.

python benchmarks/sizes.py dtype --context 512 --passages 2
"""

import argparse
import json
import time

import torch
from scipy.stats import spearmanr

import attngap


def compare_dtypes(context: int, passages: int, dtype: str, model: str) -> dict[str, float]:
    """Diagnose the same model in float32 and in half precision: verdicts that agree, rank correlations of damage."""
    found, seconds = {}, {}
    for name in ("float32", dtype):
        loaded, tokenizer = attngap.load(model, dtype=getattr(torch, name))
        start = time.process_time()
        found[name] = attngap.diagnose(loaded, tokenizer, context=context, passages=passages, ranks=(64,), quiet=False)
        seconds[name] = round(time.process_time() - start, 1)
        del loaded
    one, other = (found[name].heads for name in ("float32", dtype))
    pairs = list(zip(one, other, strict=True))
    return {
        "heads": len(pairs),
        "same_verdict": sum(a.verdict == b.verdict for a, b in pairs) / len(pairs),
        "same_kind": sum(a.kind == b.kind for a, b in pairs) / len(pairs),
        "damage": float(spearmanr([a.damage for a in one], [b.damage for b in other]).statistic),
        "recall_damage": float(spearmanr([a.recall_damage for a in one], [b.recall_damage for b in other]).statistic),
        "largest_entropy_change": max(abs(a.entropy - b.entropy) for a, b in pairs),
        **{f"seconds_{name}": value for name, value in seconds.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    half = verbs.add_parser("dtype")
    half.add_argument("--model", default="smollm2")
    half.add_argument("--dtype", default="bfloat16")
    half.add_argument("--context", type=int, default=512)
    half.add_argument("--passages", type=int, default=2)
    chosen = parser.parse_args()
    print(json.dumps(compare_dtypes(chosen.context, chosen.passages, chosen.dtype, chosen.model), indent=1))


if __name__ == "__main__":
    main()
