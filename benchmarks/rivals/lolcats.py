"""Our reading of LoLCATs (arXiv 2410.10254).

No head keeps softmax, no token is a sink: softmax within the last 64 tokens, Hedgehog features beyond, fitted to each
layer's outputs (attention transfer), then LoRA on the projections, here fitted to what the original says.
"""

import argparse
import time
from typing import Any

import torch
from conversions import converted

LOLCATS = "our reading of LoLCATs, throughout"
OPTIONS: dict[str, Any] = {"mechanism": "hedgehog", "window": 64, "sinks": 0, "keep": 0.0, "lora": 8}


def lolcats(options: argparse.Namespace) -> None:
    """Convert the original as LoLCATs does, in about the seconds of ours, unless that is done; then ask it."""
    import attngap

    folder = options.output / "lolcats"
    if not (folder / "receipt.json").exists():
        original, tokenizer = attngap.load(options.output / "model")
        start = time.process_time()
        with torch.enable_grad():
            attngap.linearize(original, tokenizer, directory=folder, measured=False, **OPTIONS)
        print(f"{LOLCATS}: {time.process_time() - start:.0f} CPU seconds", flush=True)
    converted(argparse.Namespace(**vars(options) | {"model": folder, "name": LOLCATS}))
