"""What every head of a loaded model does on a person's own sentence, and what its replacement does there."""

import math
import threading
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

from attngap.errors import AttngapError
from attngap.explorer.weights import picture
from attngap.mechanisms.variants.hybrid import Hybrid
from attngap.models.capture import Call, allowed, capture
from attngap.models.mixed import mixed_heads
from attngap.models.placement import device_of

MOST_TOKENS = 512  # beyond the window that a conversion has if none is given: within it nothing can have changed
REMEMBERED = 2  # sentences whose weights are kept, so that a click on a head needs no second pass
Seen = tuple[list[str], int, dict[str, dict[int, Tensor]]]  # tokens, how many there were, weights by model and layer


class Sentences:
    """Runs sentences through a model, and the converted one beside it, one at a time; remembers the last few."""

    def __init__(self, model: Any, tokenizer: Any, name: str, converted: Any = None):
        self.tokenizer, self.name = tokenizer, name
        self.models = {"original": model} | ({} if converted is None else {"converted": converted})
        self.lock = threading.Lock()  # of the models: a conversation takes it token by token
        self._seen: OrderedDict[str, Seen] = OrderedDict()

    @property
    def model(self) -> Any:
        return self.models["original"]

    def heads(self, text: str) -> dict[str, Any]:
        """One row per head: where its attention goes on this sentence, and how far its replacement's goes elsewhere."""
        tokens, count, models = self._run(text)
        kept = self._kept()
        rows = []
        for layer, weights in sorted(models["original"].items()):
            for head, matrix in enumerate(weights.float()):
                row = {"id": f"{layer}.{head}", "layer": layer, "head": head, **summary(matrix)}
                if "converted" in models:
                    row["changed"] = distance(matrix, models["converted"][layer][head].float())
                    row["replaced"] = layer in kept and head not in kept[layer]
                rows.append(row)
        return {"tokens": tokens, "all_tokens": count, "exact": self._exact(), "heads": rows}

    def _exact(self) -> int:
        """Up to so many tokens every replaced head reads all of them exactly, and nothing can have changed."""
        parts = mixed_heads(self.models["converted"]).values() if "converted" in self.models else ()
        near = [part.mechanism for part in parts]
        return min((m.slots if isinstance(m, Hybrid) else 0 for m in near), default=0)

    def pattern(self, text: str, layer: int, head: int) -> dict[str, Any]:
        """The head's weights, as `original` and, of a converted model, as `converted`."""
        tokens, _, models = self._run(text)
        layers = models["original"]
        if layer not in layers or not 0 <= head < layers[layer].shape[0]:
            heads = next(iter(layers.values())).shape[0]
            raise AttngapError(f"No head {layer}.{head}: layers are 0-{len(layers) - 1}, heads 0-{heads - 1}")
        return {
            "tokens": tokens,
            "models": {name: picture(found[layer][head].float()) for name, found in models.items()},
        }

    def _kept(self) -> dict[int, set[int]]:
        """Heads that keep softmax in the layers that were converted."""
        if "converted" not in self.models:
            return {}
        return {layer: set(part.keep.tolist()) for layer, part in mixed_heads(self.models["converted"]).items()}

    def _run(self, text: str) -> Seen:
        with self.lock:
            if text not in self._seen:
                self._seen[text] = self._forward(text)
                while len(self._seen) > REMEMBERED:
                    self._seen.popitem(last=False)
            return self._seen[text]

    def _forward(self, text: str) -> Seen:
        every = self.tokenizer(text, return_tensors="pt")["input_ids"]
        ids = every[:, :MOST_TOKENS]
        if ids.shape[1] < 2:
            raise AttngapError("The sentence has fewer than 2 tokens. Type a longer one")
        found = {name: _weights(model, ids) for name, model in self.models.items()}
        return [self.tokenizer.decode([i]) for i in ids[0].tolist()], every.shape[1], found


def _weights(model: Any, ids: Tensor) -> dict[int, Tensor]:
    """(h, t, t) a layer: softmax of kept heads, the mixing matrix of each replacement."""
    layers: dict[int, Tensor] = {}
    parts = mixed_heads(model)

    def keep(call: Call) -> None:
        if call.cross:
            return
        weights = weights_of(call)[0]
        if call.layer in parts:
            part = parts[call.layer]
            mixed = part.mechanism.weights(part.mechanism.read(None, call.q, call.k, call.v, rotary=call.rotary))[0]
            weights = mixed.to(weights).index_copy(0, part.keep, weights[part.keep])
        # As many digits as a picture shows; 270 heads of 512 tokens are 140 MB so.
        layers[call.layer] = weights.half().cpu()

    with torch.no_grad(), capture(model, keep):
        model(ids.to(device_of(model)))
    return layers


def weights_of(call: Call) -> Tensor:
    """(b, h, t, s): softmax over the keys each row may read."""
    k = call.k.repeat_interleave(call.heads // call.kv_heads, dim=1)
    logits = call.q @ k.mT * call.scale
    if call.bias is not None:
        logits = logits + call.bias
    may_read = allowed(call, slice(None))
    if may_read is not None:
        logits = logits.masked_fill(~may_read, -torch.inf)
    return logits.softmax(-1)


def distance(exact: Tensor, other: Tensor) -> float:
    """Mean total variation of the rows: the share of its attention that a replacement puts elsewhere."""
    return 0.5 * (exact - other).abs().sum(-1).mean().item()


def summary(weights: Tensor) -> dict[str, float]:
    """Mass on the first token, on the row itself and the one before, the largest weight, and entropy / log n."""
    t = weights.shape[0]
    rows = torch.arange(1, t)  # the first row of a causal head can only read itself
    entropy = -(weights[1:] * weights[1:].clamp_min(1e-30).log()).sum(-1).mean().item()
    return {
        "first": weights[1:, 0].mean().item(),
        "self": weights[rows, rows].mean().item(),
        "previous": weights[rows, rows - 1].mean().item(),
        "top": weights[1:].amax(-1).mean().item(),
        "entropy": entropy / math.log(t),
    }
