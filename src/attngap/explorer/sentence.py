"""What every head of a loaded model does on a person's own sentence."""

import math
import threading
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

from attngap.errors import AttngapError
from attngap.explorer.weights import picture
from attngap.models.capture import Call, allowed, capture

MOST_TOKENS = 256
REMEMBERED = 4  # sentences whose weights are kept, so that a click on a head needs no second pass


class Sentences:
    """Runs sentences through one model, one at a time, and remembers the last few."""

    def __init__(self, model: Any, tokenizer: Any, name: str):
        self.model, self.tokenizer, self.name = model, tokenizer, name
        self._seen: OrderedDict[str, tuple[list[str], dict[int, Tensor]]] = OrderedDict()
        self._lock = threading.Lock()

    def heads(self, text: str) -> dict[str, Any]:
        """One row a head: where its attention goes on this sentence."""
        tokens, layers = self._run(text)
        rows = []
        for layer, weights in sorted(layers.items()):
            for head, matrix in enumerate(weights):
                rows.append({"id": f"{layer}.{head}", "layer": layer, "head": head, **summary(matrix)})
        return {"tokens": tokens, "heads": rows}

    def pattern(self, text: str, layer: int, head: int) -> dict[str, Any]:
        tokens, layers = self._run(text)
        if layer not in layers or not 0 <= head < layers[layer].shape[0]:
            heads = next(iter(layers.values())).shape[0]
            raise AttngapError(f"No head {layer}.{head}: layers are 0-{len(layers) - 1}, heads 0-{heads - 1}")
        return {"tokens": tokens, **picture(layers[layer][head])}

    def _run(self, text: str) -> tuple[list[str], dict[int, Tensor]]:
        with self._lock:
            if text not in self._seen:
                self._seen[text] = self._forward(text)
                while len(self._seen) > REMEMBERED:
                    self._seen.popitem(last=False)
            return self._seen[text]

    def _forward(self, text: str) -> tuple[list[str], dict[int, Tensor]]:
        ids = self.tokenizer(text, return_tensors="pt")["input_ids"][:, :MOST_TOKENS]
        if ids.shape[1] < 2:
            raise AttngapError("The sentence has fewer than 2 tokens. Type a longer one")
        layers: dict[int, Tensor] = {}

        def keep(call: Call) -> None:
            if not call.cross:
                layers[call.layer] = weights_of(call)[0]

        with torch.no_grad(), capture(self.model, keep):
            self.model(ids)
        return [self.tokenizer.decode([i]) for i in ids[0].tolist()], layers


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
