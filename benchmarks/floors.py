"""Does a certified floor that is weighted by what the model reads rank heads by damage?

    python benchmarks/floors.py DIAGNOSIS [--model smollm2] [--context 1024]

Takes floors of every head on one held-out passage of text and on repeated random tokens of another seed, none of which
the diagnosis has seen, and prints their rank correlation with the damage in DIAGNOSIS/diagnosis.json: the plain floor
as a share of the far weights and as it is, and the floor weighted by gradients and values (docs/theory.md 3.7). Rank 0
is the weighted far part itself, which certifies nothing.
"""

import argparse
import dataclasses
import functools
import json
from pathlib import Path

import torch
from scipy.stats import spearmanr
from torch import Tensor

from attngap.diagnosis.bounds import CELLS
from attngap.heads.damage import label_directions, projections
from attngap.heads.forward import forward
from attngap.heads.inputs import LayerInputs, layer_inputs
from attngap.heads.passages import passages, stress
from attngap.models.capture import Call
from attngap.models.load import load
from attngap.theory.certificates import floor, weighted_floor

RANKS = (8, 16, 64)
DRAWS = 2


def read(model, tokens: Tensor) -> dict[int, tuple[LayerInputs, Tensor]]:
    """What every layer reads, and the sizes of the gradients at the rows of its heads' outputs."""
    inputs: dict[int, LayerInputs] = {}
    found: dict[int, tuple[LayerInputs, Tensor]] = {}

    def watch(call: Call) -> Tensor:
        (one,) = layer_inputs(call)
        q, k, v = (x.detach() for x in (one.q, one.k, one.v))
        inputs[call.layer] = dataclasses.replace(one, q=q, k=k, v=v)
        return torch.zeros_like(call.output[0])

    def observe(layer: int, gradients: Tensor) -> None:
        found[layer] = inputs[layer], gradients.square().sum(-1).mean(0).sqrt()

    directions = functools.partial(label_directions, draws=DRAWS)
    generator = torch.Generator().manual_seed(0)
    projections(model, lambda: forward(model, tokens).logits, watch, directions, generator, observe)
    return found


def scores(model, tokens: Tensor, window: int, sinks: int) -> dict[str, dict[str, float]]:
    """By head, by name of the floor."""
    found: dict[str, dict[str, float]] = {}
    for layer, (inputs, rows) in read(model, tokens).items():
        values = inputs.v.repeat_interleave(inputs.group, 0)
        columns = (values - values.mean(1, keepdim=True)).norm(dim=-1)
        for head, weights in enumerate(inputs.weights()):
            plain = floor(weights, RANKS, window, sinks, cells=CELLS)
            read_floor = weighted_floor(weights, rows[head], columns[head], RANKS, window, sinks, cells=CELLS)
            here = {"weighted, rank 0": float(read_floor.far)}
            for place, rank in enumerate(RANKS):
                here[f"share of the far weights, rank {rank}"] = float(plain.relative[place])
                here[f"as it is, rank {rank}"] = float(plain.value[place])
                here[f"weighted, rank {rank}"] = float(read_floor.value[place])
            found[f"{layer}.{head}"] = here
    return found


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("diagnosis", type=Path)
    arguments.add_argument("--model", default="smollm2")
    arguments.add_argument("--context", type=int, default=1024)
    asked = arguments.parse_args()
    content = json.loads((asked.diagnosis / "diagnosis.json").read_text(encoding="utf-8"))
    near = {key: content["options"][key] for key in ("window", "sinks")}
    model, tokenizer = load(asked.model)
    text = passages(tokenizer, context=asked.context, count=1, seed=17, split="heldout")
    repeats, _ = stress(tokenizer, context=asked.context, seed=17, period=2 * near["window"])
    for key, tokens in (("damage", text), ("recall_damage", repeats)):
        found = scores(model, tokens, **near)
        heads = [head for head in content["heads"] if head.get(key) is not None]
        print(key, flush=True)
        for name in sorted(found[heads[0]["id"]]):
            order = spearmanr([found[head["id"]][name] for head in heads], [head[key] for head in heads])
            print(f"  {order[0]:6.3f}  {name}", flush=True)


if __name__ == "__main__":
    main()
