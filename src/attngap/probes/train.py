"""The training loop: AdamW, warm-up and cosine, clipping, early stop at solved, checkpoints that resume to the bit."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from attngap.errors import AttngapError, unknown
from attngap.probes import checkpoint
from attngap.probes.model import Decoder
from attngap.probes.tasks.base import Batch, Task, stream

BLOCK = 16  # batches drawn together: one call of the generator for many steps
DTYPES = ("float32", "bfloat16")
Report = Callable[[int, float, float | None], None]  # step, loss, latest validation score


@dataclasses.dataclass(frozen=True)
class TrainOptions:
    steps: int = 1000
    batch: int = 64
    warmup: float = 0.05  # share of the steps
    weight_decay: float = 0.0
    clip: float = 1.0
    evaluate_every: int = 100
    validation: int = 256  # sequences, for early stop and for choosing the learning rate
    test: int = 1024  # sequences, looked at once
    stop_at_solved: bool = True
    dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        for label in ("steps", "batch", "evaluate_every", "validation", "test"):
            if getattr(self, label) < 1:
                raise AttngapError(f"train: {label} must be at least 1, got {getattr(self, label)}")
        if not 0 <= self.warmup <= 1:
            raise AttngapError(f"train: warmup is a share of the steps, from 0 to 1, got {self.warmup}")
        if self.dtype not in DTYPES:
            raise unknown("dtype of training", self.dtype, DTYPES)

    def rate(self, step: int) -> float:
        """The share of the learning rate at a step: linear warm-up, then half a cosine down to zero."""
        warm = max(1, round(self.warmup * self.steps))
        if step < warm:
            return (step + 1) / warm
        return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, self.steps - warm)))


@dataclasses.dataclass
class Trained:
    """What a training run found. `score` is on the test sequences; None when the loss left the finite numbers."""

    score: float | None
    validation: float | None
    loss: float | None
    steps: int
    solved: bool
    seconds: float
    tokens_per_second: float
    curve: list[tuple[int, float, float]]  # step, mean loss since the last entry, validation score


def train(
    model: Decoder,
    task: Task,
    options: TrainOptions,
    *,
    learning_rate: float,
    seed: int = 0,
    checkpoints: Path | None = None,
    report: Report | None = None,
) -> Trained:
    """Train `model` in place. With `checkpoints` (a file) it is saved at every evaluation and picked up from there.

    Step s always sees the same sequences, so a resumed run equals one that was never stopped.
    """
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=options.weight_decay, fused=True
    )
    progress = checkpoint.load(checkpoints, model, optimizer) or checkpoint.Progress()
    validation = task.sample(options.validation, stream("validation", 0), "validation")
    block: Batch | None = None
    total, since = torch.zeros(()), 0
    start = time.perf_counter()
    for step in range(progress.step, options.steps):
        if progress.finished:
            break
        index, offset = divmod(step, BLOCK)
        if block is None or offset == 0:
            block = task.sample(options.batch * BLOCK, stream("train", seed, index), "train")
        batch = block[offset * options.batch : (offset + 1) * options.batch]
        total += _step(model, task, batch, optimizer, options, learning_rate * options.rate(step))
        since += 1
        last = step + 1 == options.steps
        if last or (step + 1) % options.evaluate_every == 0:
            loss, score = total.item() / since, evaluate(model, task, validation, options)
            total, since = torch.zeros(()), 0
            progress.step = step + 1
            progress.diverged = not (math.isfinite(loss) and math.isfinite(score))
            if not progress.diverged:
                progress.curve.append((step + 1, loss, score))
            progress.solved = task.solved(score)
            progress.finished = last or progress.diverged or (options.stop_at_solved and progress.solved)
            progress.seconds += time.perf_counter() - start
            checkpoint.save(checkpoints, model, optimizer, progress)
            start = time.perf_counter()
            if report is not None:
                report(step + 1, loss, score)
    return _result(model, task, options, progress)


def _step(
    model: Decoder, task: Task, batch: Batch, optimizer: torch.optim.Optimizer, options: TrainOptions, rate: float
) -> Tensor:
    for group in optimizer.param_groups:
        group["lr"] = rate
    with _precision(options):
        loss = loss_of(task, model(batch.inputs, batch.where), batch)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip)
    optimizer.step()
    return loss.detach()


def loss_of(task: Task, outputs: Tensor, batch: Batch) -> Tensor:
    """Cross entropy for classes, squared error for numbers."""
    if task.outputs == 1:
        return F.mse_loss(outputs.squeeze(-1).float(), batch.targets)
    return F.cross_entropy(outputs.flatten(0, 1).float(), batch.targets.flatten())


@torch.no_grad()
def evaluate(model: Decoder, task: Task, batch: Batch, options: TrainOptions) -> float:
    """The task's score on `batch`, in pieces of the training batch."""
    scores = []
    for start in range(0, len(batch), options.batch):
        piece = batch[start : start + options.batch]
        with _precision(options):
            outputs = model(piece.inputs, piece.where)
        scores.append(task.grade(outputs.float(), piece) * len(piece))
    return sum(scores) / len(batch)


def _precision(options: TrainOptions) -> contextlib.AbstractContextManager[Any]:
    if options.dtype == "float32":
        return contextlib.nullcontext()
    return torch.autocast("cpu", dtype=torch.bfloat16)


def _result(model: Decoder, task: Task, options: TrainOptions, progress: checkpoint.Progress) -> Trained:
    score = None
    if not progress.diverged:
        score = evaluate(model, task, task.sample(options.test, stream("test", 0), "test"), options)
    _, loss, validation = progress.curve[-1] if progress.curve else (0, None, None)
    return Trained(
        score=score,
        validation=validation,
        loss=loss,
        steps=progress.step,
        solved=score is not None and task.solved(score),
        seconds=progress.seconds,
        tokens_per_second=progress.step * options.batch * task.tokens / max(progress.seconds, 1e-9),
        curve=progress.curve,
    )
