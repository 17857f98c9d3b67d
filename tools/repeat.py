"""Show that results repeat to the bit: a seeded diagnosis and conversions of tiny models, as hashes of their numbers.

Run it before and after a change that should change no result, and compare what it prints:

    python tools/repeat.py > before.txt
    python tools/repeat.py | diff before.txt -
"""

import hashlib
import struct
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import attngap
from attngap.conversion.evaluate import Measures

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests import zoo

TEXT = " ".join(f"{i} bottles of beer on the wall, {i} bottles of beer. take one down!" for i in range(600))
DIAGNOSIS: dict[str, Any] = {"context": 64, "passages": 2, "ranks": (2, 4), "window": 6, "sinks": 2, "verify": 3}
CONVERSION: dict[str, Any] = {
    "context": 64,
    "tokens": 448,
    "steps": 6,
    "joint": 5,
    "rounds": 1,
    "window": 6,
    "sinks": 2,
}
MEASURES = Measures(passages=1, trials=1, lengths=(64,), contexts=())
NUMBERS = ("entropy", "far", "kappa", "induction", "floor", "ceiling", "fit", "damage", "recall_damage", "importance")


def main() -> None:
    torch.set_num_threads(1)  # the number of threads decides the order of sums
    for name, model in (("decoder", zoo.tiny("llama")), ("encoder", zoo.tiny("bert"))):
        words = zoo.tokenizer()
        found = attngap.diagnose(model, words, TEXT, name="tiny", **DIAGNOSIS)
        say(name, "diagnosis", [getattr(head, field) for head in found.heads for field in NUMBERS])
        verified = found.verification
        say(name, "verification", [] if verified is None else verified.measured)
        for units in ("head", "group"):
            plan = found.plan(0.25, units)
            say(name, f"plan by {units}", [number for head in plan.keep for number in head])
            converted, receipt = attngap.linearize(model, words, plan, TEXT, measures=MEASURES, **CONVERSION)
            say_conversion(name, f"planned by {units}", converted, receipt)
        converted, receipt = attngap.linearize(
            model, words, found.plan(0.0, "head"), TEXT, keep=0.5, measures=MEASURES, **CONVERSION
        )
        say_conversion(name, "half kept", converted, receipt)


def say_conversion(name: str, what: str, converted: Any, receipt: Any) -> None:
    quality = [x for q in receipt.quality.values() for x in (q.perplexity, q.divergence, q.induction, q.needle)]
    kept = [number for head in receipt.keep for number in head]
    say(name, f"receipt, {what}", [*kept, *quality, *receipt.fit_error.values(), *receipt.joint.values()])
    weights = [
        x for key, w in sorted(converted.state_dict().items()) if ".attngap." in key for x in w.flatten().tolist()
    ]
    say(name, f"adapter, {what}", weights)


def say(name: str, what: str, numbers: Iterable[float | None]) -> None:
    """One line: how many numbers and a hash of all their bits; None counts as NaN."""
    found = [float("nan") if number is None else float(number) for number in numbers]
    digest = hashlib.sha256(struct.pack(f"<{len(found)}d", *found)).hexdigest()[:16]
    print(f"{name:8} {what:28} {len(found):6} {digest}", flush=True)


if __name__ == "__main__":
    main()
