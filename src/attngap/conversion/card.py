"""The model card of a converted folder: what it is, what it costs, what it gains, where its limits are."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import transformers

from attngap.conversion.by_length import AtLength
from attngap.conversion.quality import STATES, Quality, is_of_states
from attngap.conversion.receipt import Entry, Receipt
from attngap.models.load import ALIASES
from attngap.models.save import BASE, Conversion

LIMITS = """\
- Replaced heads read the first and the last tokens exactly and everything between through a state of fixed size: exact
  recall from the middle of a long context rests on the heads that were kept.
- {length}
- Packed sequences and custom 4D attention masks are refused.
- The figures are those of this receipt, on its texts and machine; measure yours: `attngap eval DIR --text FILE`."""


HOLDS = """Fitted for up to {length} tokens, with features that do not see positions. Beyond that, or beyond the lengths
  of the receipt, nothing is claimed."""
ENDS = """Fitted and measured at {context} tokens. From there on a replaced head reads first and last tokens alone:
  positions enter this model's keys in a way that cannot be undone. For more convert with a longer --context."""

HEADER = """\
| | perplexity | ratio | KL | induction | needle |
|---|---|---|---|---|---|
"""


BY_LENGTH = """\
| over the last tokens | tokens | ratio | KL | digits recalled | repeated sequence |
|---|---|---|---|---|---|
"""


def model_card(receipt: Receipt, conversion: Conversion) -> str:
    """README.md with the metadata hubs read."""
    base = receipt.model if conversion.base.name in ("", BASE) else conversion.base.name
    table = _figures(receipt.quality, receipt.by_length) or "Not measured yet: `attngap eval DIR`."
    later = "".join(_later(entry) for entry in receipt.entries)
    notes = "".join(f"- {note}\n" for note in receipt.notes)
    known = hub_id(base)
    auto = "AutoModelForCausalLM" if writes_text(conversion) else "AutoModel"
    return f"""---
{f"base_model: {known}" + chr(10) if known else ""}library_name: transformers
tags: [attngap, linear-attention]
---
# {known or base}, {receipt.heads - receipt.kept} of {receipt.heads} attention heads replaced

Made by attngap: the other {receipt.kept} heads keep softmax. Replacement: {receipt.mechanism},
{receipt.exact_tokens()} and the first {receipt.options["sinks"]} exact.
Base weights: sha256 `{conversion.base.sha256}`.

```python
from transformers import {auto}, AutoTokenizer

# DIR is this folder; its code is one file that imports attngap (pip install attngap)
model = {auto}.from_pretrained("DIR", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("DIR")
```

## Receipt

{table}

{notes}{later}
## Limits

{LIMITS.format(length=_length(receipt, conversion))}
"""


def writes_text(conversion: Conversion) -> bool:
    """Encoders do not. A class that is not transformers' own may."""
    kind = getattr(transformers, conversion.base.architecture, None)
    return kind is None or kind.can_generate()


def hub_id(name: str) -> str | None:
    """What a hub calls the base model; a path on somebody's disk is nothing that a card could link to.

    >>> hub_id("smollm2"), hub_id("openai-community/gpt2"), hub_id("./my/model")
    ('HuggingFaceTB/SmolLM2-135M-Instruct', 'openai-community/gpt2', None)
    """
    if name in ALIASES:
        return ALIASES[name].hub
    is_id = re.fullmatch(r"\w[\w.-]*/[\w.-]+", name) and not Path(name).exists()
    return name if is_id else None


def _figures(quality: Mapping[str, Quality], by_length: Sequence[AtLength]) -> str:
    """Tables of whole passages, and of the last tokens of passages of each length."""
    if quality and is_of_states(quality):
        rows = "".join(f"\n| {name} | {each.divergence:.4f} |" for name, each in quality.items())
        return f"| | {STATES} |\n|---|---|{rows}"
    whole = "\n".join(
        f"| {name} | {_number(q.perplexity, '.2f')} | {_number(q.perplexity_ratio, '.4f')} | {q.divergence:.4f} "
        f"| {_number(q.induction, '.1%')} | {_number(q.needle, '.1%')} |"
        for name, q in quality.items()
    )
    lengths = "\n".join(
        f"| {row.part} | {row.length:,} | {_number(row.perplexity_ratio, '.4f')} | {_number(row.divergence, '.4f')} "
        f"| {_number(row.needle, '.0%')} | {_number(row.repetition, '.0%')} |"
        for row in by_length
    )
    return "\n\n".join(part for part in (whole and HEADER + whole, lengths and BY_LENGTH + lengths) if part)


def _later(entry: Entry) -> str:
    notes = "".join(f"- {note}\n" for note in entry.notes)
    told = f"On {entry.text} (sha256 `{entry.text_sha256[:16]}`)"
    return f"\n### Measured {entry.time[:10]}\n\n{told}:\n\n{_figures(entry.quality, entry.by_length)}\n\n{notes}"


def _length(receipt: Receipt, conversion: Conversion) -> str:
    """How far the features carry, by the options the layers were built with."""
    context = receipt.options["context"]
    if any(layer.options.get("reach") is not None for layer in conversion.layers):
        return ENDS.format(context=context)
    longest = receipt.options.get("length") or min(receipt.positions or context, 8192)
    return HOLDS.format(length=longest)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
