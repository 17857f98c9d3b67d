"""Throughput of the probes' trainer: python benchmarks/probes.py [--threads N] [--json].

Ratios within one run are what counts. One thread is how probes run: side by side, one on each core. Three questions:
how much faster than a plain PyTorch decoder of the same sizes at the MQAR preset; how linear mechanisms compare with
softmax at 4096 tokens; how much of a step the loop around it takes.
"""

import argparse
import json
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attngap.probes.spec import build, make_spec
from attngap.probes.tasks.base import stream
from attngap.probes.train import BLOCK, Trainer
from attngap.provenance import provenance

ROUNDS = {"preset": 40, "long": 15}  # of BLOCK steps: sequences for so many are drawn together
LONG = {"length": 4096, "pairs": 64, "vocabulary": 256}


class PlainLayer(nn.Module):
    """Attention as tutorials write it."""

    def __init__(self, width: int, heads: int, taps: int):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.convs = nn.ModuleList(nn.Conv1d(width, width, taps, groups=width, padding=taps - 1) for _ in range(3))
        self.head_norm = nn.LayerNorm(width // heads)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        parts = [f(y) for f in (self.q, self.k, self.v)]
        parts = [F.silu(conv(part.mT)[..., : x.shape[1]].mT) for conv, part in zip(self.convs, parts, strict=True)]
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return x + self.out(self.head_norm(mixed).flatten(2))


class PlainDecoder(nn.Module):
    """The same sizes the obvious way: logits of the whole vocabulary at every place."""

    def __init__(self, vocabulary: int, width: int, heads: int, layers: int, taps: int):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(PlainLayer(width, heads, taps) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def plain_step(spec: dict) -> Callable[[int], None]:
    task, _, options = build(spec)
    sizes = spec["model"]
    model = PlainDecoder(task.outputs, sizes["width"], sizes["heads"], sizes["layers"], sizes["conv"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(index: int) -> None:
        batch = task.sample(options.batch, stream("train", 0, index))
        labels = torch.full_like(batch.inputs, -100).scatter_(1, batch.where, batch.targets)
        loss = F.cross_entropy(model(batch.inputs).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss.item()

    return step


def our_step(spec: dict) -> Callable[[int], object]:
    task, model, options = build(spec)
    return Trainer(model, task, options, 1e-3, 0).step


def bare_step(spec: dict) -> Callable[[int], object]:
    """Forward, backward, clipping and update on one batch, and nothing around them."""
    task, model, options = build(spec)
    trainer = Trainer(model, task, options, 1e-3, 0)
    batch = trainer.batch(0)

    def step(index: int) -> None:
        loss = F.cross_entropy(model(batch.inputs, batch.where).flatten(0, 1), batch.targets.flatten())
        trainer.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(trainer.parameters, 1.0)
        trainer.optimizer.step()

    return step


def seconds(steps: dict[str, Callable[[int], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds a step in every round, the candidates taking turns so that all meet the same machine."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step(0)
    for turn in range(rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            for index in range(turn * BLOCK, (turn + 1) * BLOCK):
                step(index)
            times[name].append((time.perf_counter() - start) / BLOCK)
    return times


def ratio(above: list[float], below: list[float]) -> float:
    """The median over rounds: what disturbs a round mostly disturbs both."""
    return median(a / b for a, b in zip(above, below, strict=True))


def measure() -> dict:
    torch.manual_seed(0)
    spec = make_spec("mqar", "softmax")
    tokens = spec["task_options"]["length"] * spec["train"]["batch"]
    step = seconds({"plain": plain_step(spec), "ours": our_step(spec), "bare": bare_step(spec)}, ROUNDS["preset"])
    long = {
        name: our_step(make_spec("mqar", name, task_options=LONG, train={"batch": 1}))
        for name in ("softmax", "elu", "gla", "gated-delta")
    }
    at_4096 = seconds(long, ROUNDS["long"])
    return {
        "mqar": {f"{name}_tokens_per_second": tokens / median(values) for name, values in step.items()},
        "speedup_over_plain": ratio(step["plain"], step["ours"]),
        "loop_overhead": 1 - ratio(step["bare"], step["ours"]),
        "tokens_per_second_at_4096": {name: LONG["length"] / median(values) for name, values in at_4096.items()},
        "over_softmax_at_4096": {name: ratio(at_4096["softmax"], values) for name, values in at_4096.items()},
        "provenance": provenance(threads=torch.get_num_threads()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    result = measure()
    if options.json:
        print(json.dumps(result, indent=2))
        return
    print(f"MQAR preset: {result['speedup_over_plain']:.2f}x a plain decoder")
    print(f"the loop takes {result['loop_overhead']:.1%} of a step")
    for name, found in result["over_softmax_at_4096"].items():
        print(f"4096 tokens, {name}: {found:.1f}x softmax's tokens a second")


if __name__ == "__main__":
    main()
