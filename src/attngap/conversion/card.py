"""The model card of a converted folder: what it is, what it costs, what it gains, where its limits are."""

from attngap.conversion.receipt import Receipt
from attngap.models.save import BASE, Conversion

LIMITS = """\
- Replaced heads read the first and the last tokens exactly and everything between through a state of fixed size: exact
  recall from the middle of a long context rests on the heads that were kept.
- {length}
- Packed sequences and custom 4D attention masks are refused, as are caches that can be cropped (assisted generation).
- The figures are those of this receipt, on its texts and machine; measure yours: `attngap eval DIR --text FILE`."""


HOLDS = """Fitted for up to {length} tokens, with features that do not see positions. Beyond that, or beyond the lengths
  of the receipt, nothing is claimed."""
ENDS = """Fitted and measured at {context} tokens. From there on a replaced head reads first and last tokens alone:
  positions enter this model's keys in a way that cannot be undone. For more convert with a longer --context."""

HEADER = """\
| | perplexity | ratio | KL | induction | needle |
|---|---|---|---|---|---|
"""


def model_card(receipt: Receipt, conversion: Conversion) -> str:
    """README.md with the metadata hubs read."""
    base = receipt.model if conversion.base.name == BASE else conversion.base.name
    rows = "\n".join(
        f"| {name} | {_number(q.perplexity, '.2f')} | {_number(q.perplexity_ratio, '.4f')} | {q.divergence:.4f} "
        f"| {_number(q.induction, '.1%')} | {_number(q.needle, '.1%')} |"
        for name, q in receipt.quality.items()
    )
    table = HEADER + rows if rows else "Not measured yet: `attngap eval DIR`."
    notes = "".join(f"- {note}\n" for note in receipt.notes)
    return f"""---
base_model: {base}
library_name: transformers
tags: [attngap, linear-attention]
---
# {base}, {receipt.heads - receipt.kept} of {receipt.heads} attention heads replaced

Made by attngap: the other {receipt.kept} heads keep softmax. Replacement: {receipt.mechanism}, the last
{receipt.options["window"]} and the first {receipt.options["sinks"]} tokens exact.
Base weights: sha256 `{conversion.base.sha256}`.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

# DIR is this folder; its code is one file that imports attngap (pip install attngap)
model = AutoModelForCausalLM.from_pretrained("DIR", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("DIR")
```

## Receipt

{table}

{notes}
## Limits

{LIMITS.format(length=_length(receipt, conversion))}
"""


def _length(receipt: Receipt, conversion: Conversion) -> str:
    """How far the features carry, by the options the layers were built with."""
    context = receipt.options["context"]
    if any(layer.options.get("reach") is not None for layer in conversion.layers):
        return ENDS.format(context=context)
    longest = receipt.options.get("length") or min(receipt.positions or context, 8192)
    return HOLDS.format(length=longest)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
