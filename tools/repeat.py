"""Show that results repeat to the bit: a seeded diagnosis and conversions of tiny models, as hashes of their numbers.

Run it before and after a change that should change no result, and compare what it prints:

    python tools/repeat.py > before.txt
    python tools/repeat.py | diff before.txt -
"""

import hashlib
import string
import struct
from collections.abc import Iterable
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

import attngap
from attngap.conversion.evaluate import Measures

TEXT = " ".join(f"{i} bottles of beer on the wall, {i} bottles of beer. take one down!" for i in range(600))
SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
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
    for name, model in (("decoder", decoder()), ("encoder", encoder())):
        words = tokenizer()
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


def decoder() -> Any:
    config = transformers.LlamaConfig(
        **SIZES, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256
    )
    return sharpened(transformers.LlamaForCausalLM, config)


def encoder() -> Any:
    return sharpened(
        transformers.BertModel, transformers.BertConfig(**SIZES, num_attention_heads=4, max_position_embeddings=256)
    )


def sharpened(kind: Any, config: Any) -> Any:
    """A random model whose heads differ from uniform attention."""
    torch.manual_seed(0)
    model = kind(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2 and "embed" not in name:
                weight.mul_(6)
    return model


def tokenizer() -> Any:
    """One token per character."""
    letters = ["[PAD]", *string.printable.replace("\x0b", "").replace("\x0c", "")][: SIZES["vocab_size"]]
    inner = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(letters)}, unk_token="a"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="[PAD]")


if __name__ == "__main__":
    main()
