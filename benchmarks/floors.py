"""Does a certified floor that is weighted by what the model reads rank heads by damage?

    python benchmarks/floors.py DIAGNOSIS [--model smollm2] [--context 512]

Scaling rows and columns keeps the rank of every block, so sum_ij s_i^2 c_j^2 (A_ij - W_ij)^2 >= the tails of
diag(s) A diag(c) over disjoint rectangles, for every causal linear attention W of rank r. Here s_i is the root mean
square of the gradient at row i of a head's output, labels drawn from the model, and c_j the length of key j's centered
value.
Prints the rank correlation of each floor with the damage in DIAGNOSIS/diagnosis.json, on text and on recall.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from scipy.stats import spearmanr
from torch import Tensor

from attngap.heads.damage import frozen
from attngap.heads.passages import passages, stress
from attngap.models.capture import Call, capture
from attngap.models.load import load

RANKS = (0, 8, 16, 32, 64)
DRAWS = 2
DEPTH = 3  # of the dyadic split into rectangles


def read(model, tokens: Tensor) -> dict[int, tuple[Tensor, Tensor, Tensor]]:
    """By layer: weights (h, t, t), root mean square gradients of rows (h, t), lengths of centered values (h, t)."""
    weights: dict[int, Tensor] = {}
    lengths: dict[int, Tensor] = {}
    leaves: dict[int, Tensor] = {}

    def watch(call: Call) -> Tensor:
        group = call.heads // call.kv_heads
        k, v = (x[0].detach().repeat_interleave(group, 0) for x in (call.k, call.v))
        logits = call.q[0].detach() @ k.mT * call.scale
        causal = torch.ones(logits.shape[-2:], dtype=torch.bool).tril()
        weights[call.layer] = logits.masked_fill(~causal, -torch.inf).softmax(-1)
        lengths[call.layer] = (v - v.mean(1, keepdim=True)).norm(dim=-1)
        leaves[call.layer] = torch.zeros_like(call.output, requires_grad=True)
        return call.output + leaves[call.layer]

    squares = {}
    with frozen(model), torch.enable_grad(), capture(model, watch):
        logp = model(tokens, use_cache=False).logits[0].float().log_softmax(-1)
        for draw in range(DRAWS):
            dice = torch.Generator().manual_seed(draw)
            labels = torch.multinomial(logp.detach().exp(), 1, generator=dice)
            loss = logp.gather(-1, labels).sum()
            grads = torch.autograd.grad(loss, list(leaves.values()), retain_graph=draw < DRAWS - 1)
            for layer, g in zip(leaves, grads, strict=True):
                squares[layer] = squares.get(layer, 0) + g[0].square().sum(-1) / DRAWS
    return {layer: (weights[layer], squares[layer].sqrt(), lengths[layer]) for layer in weights}


def rectangles(n: int) -> Iterator[tuple[slice, slice]]:
    """Disjoint blocks of rows below columns in a triangle of n."""
    todo = [(0, n, 0)]
    while todo:
        low, high, depth = todo.pop()
        if depth < DEPTH and high - low >= 32:
            cut = (low + high) // 2
            yield slice(cut, high), slice(low, cut + 1)
            todo += [(low, cut, depth + 1), (cut + 1, high, depth + 1)]


def floors(weights: Tensor) -> dict[int, float]:
    """Sum of squared singular values beyond each rank, over the rectangles; exact, in float64."""
    found = dict.fromkeys(RANKS, 0.0)
    for rows, columns in rectangles(len(weights)):
        block = weights[rows, columns].double()
        values = torch.linalg.eigvalsh(block @ block.mT).clamp(min=0).flip(0)
        for rank in RANKS:
            found[rank] += float(values[rank:].sum())
    return found


def scores(model, tokens: Tensor, window: int, sinks: int) -> dict[str, dict[str, float]]:
    """By head, by name of the floor."""
    found: dict[str, dict[str, float]] = {}
    for layer, (weights, rows, columns) in read(model, tokens).items():
        for head, matrix in enumerate(weights):
            s, c = rows[head][:, None], columns[head][None, :]
            forms = {"weights": matrix, "rows": s * matrix, "values": matrix * c, "rows and values": s * matrix * c}
            here = found.setdefault(f"{layer}.{head}", {})
            for name, form in forms.items():
                far = form[sinks + window - 1 :, sinks : len(form) - window + 1]  # beyond window and sinks
                for where, part in (("all", form), ("far", far)):
                    here |= {f"{name}, {where}, rank {rank}": value for rank, value in floors(part).items()}
    return found


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("diagnosis", type=Path)
    arguments.add_argument("--model", default="smollm2")
    arguments.add_argument("--context", type=int, default=512)
    asked = arguments.parse_args()
    content = json.loads((asked.diagnosis / "diagnosis.json").read_text(encoding="utf-8"))
    near = {key: content["options"][key] for key in ("window", "sinks")}
    model, tokenizer = load(asked.model)
    text = passages(tokenizer, None, context=asked.context, count=2, split="heldout")
    kinds = {"damage": [text[:1], text[1:]], "recall_damage": [stress(tokenizer, context=asked.context, seed=3)[0]]}
    for key, sequences in kinds.items():
        found = [scores(model, tokens, **near) for tokens in sequences]
        heads = [head for head in content["heads"] if head.get(key) is not None]
        print(key)
        for name in found[0][heads[0]["id"]]:
            x = [sum(one[head["id"]][name] for one in found) for head in heads]
            print(f"  {spearmanr(x, [head[key] for head in heads])[0]:6.3f}  {name}")


if __name__ == "__main__":
    main()
