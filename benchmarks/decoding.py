"""Decoding and prefill of SmolLM2 with a tenth of its heads kept against the original, and the limit that memory sets.

    OMP_NUM_THREADS=1 python benchmarks/decoding.py --contexts 256 1024 4096 16384 --prefill 512 1024 4096 -o speed.json
    OMP_NUM_THREADS=1 python benchmarks/decoding.py --contexts 1024 --weights bfloat16 int8

Heads are replaced by what a conversion builds, with prototypes that were not fitted: how fast they are does not depend
on their numbers. They are measured as `attngap bench FOLDER` measures a converted folder. int8 is torch's dynamic
quantization of linear layers.
"""

import argparse
import json
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from attngap.benchmark.model import model_speeds
from attngap.heads.replacement import build_replacement
from attngap.models.load import load_model
from attngap.models.plan import Replacement
from attngap.models.positions import layer_positions
from attngap.models.shapes import layer_shapes
from attngap.models.swap import swap
from attngap.options import KEEP
from attngap.provenance import provenance


def converted(model: PreTrainedModel) -> PreTrainedModel:
    """Whole groups of heads are kept, spread over the layers."""
    layers, shapes = {}, layer_shapes(model)
    groups = [(shape.layer, group) for shape in shapes for group in range(shape.kv_heads)]
    kept = set(groups[:: round(1 / KEEP)])
    for shape, positions in zip(shapes, layer_positions(model), strict=True):
        mechanism, _ = build_replacement(shape, Replacement(), positions=positions)
        size = shape.heads // shape.kv_heads
        heads = [head for head in range(shape.heads) if (shape.layer, head // size) in kept]
        layers[shape.layer] = mechanism.requires_grad_(False), heads
    return swap(model, layers)


def with_weights(weights: str) -> dict[str, Any]:
    """Original and converted, with their weights in this type; what replaces heads computes in float32."""
    model = load_model("smollm2").eval()
    if weights == "bfloat16":
        model = model.to(torch.bfloat16)
    models: dict[str, Any] = {"original": model, "converted": converted(model)}
    if weights == "int8":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that this form of quantization will move to another package
            quantized = torch.ao.quantization.quantize_dynamic
            models = {name: quantized(each, {torch.nn.Linear}, dtype=torch.qint8) for name, each in models.items()}
    return models


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="*", default=[256, 1024, 4096, 16384])
    parser.add_argument("--prefill", type=int, nargs="*", default=[])
    parser.add_argument("--weights", nargs="*", default=["float32"], choices=["float32", "bfloat16", "int8"])
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for weights in options.weights:
        models = with_weights(weights)
        for _, found in model_speeds(models, options.contexts, options.prefill):
            if weights != "int8" or found["what"] != "weights":  # packed weights are no parameters
                rows.append({"weights": weights, **found})
                print(json.dumps(rows[-1]), flush=True)
    if options.output:
        record = {"threads": torch.get_num_threads(), "rows": rows, "provenance": provenance()}
        options.output.write_text(json.dumps(record, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
