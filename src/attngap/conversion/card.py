"""The model card of a converted folder: what it is, what it costs, what it gains, where its limits are."""

from attngap.conversion.receipt import Receipt
from attngap.models.save import BASE, Conversion

LIMITS = """\
- Replaced heads read the first and the last tokens exactly and everything between through a state of fixed size: exact
  recall from the middle of a long context rests on the heads that were kept.
- Fitted and measured at {context} tokens. From there on a replaced head reads the first and the last tokens alone:
  features do not carry over to positions they were not fitted to. For more convert with a longer --context.
- Packed sequences and custom 4D attention masks are refused, as are caches that can be cropped (assisted generation).
- The figures are those of this receipt, on its texts and machine; measure yours: `attngap eval DIR --text FILE`."""


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

{LIMITS.format(context=receipt.options["context"])}
"""


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
