"""The training loop: AdamW, warm-up and cosine, clipping, early stop at solved, checkpoints that resume to the bit."""

import contextlib
import dataclasses
import functools
import math
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from attngap.errors import AttngapError, unknown
from attngap.models.placement import check_products
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
    dtype: str = "float32"  # or "bfloat16": products in it, weights and sums in float32

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
    cpu_seconds: float  # of all threads: what the run costs where others use the machine too
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
    """Train `model` in place, on the device it is on. With `checkpoints` (a file) it is saved at every evaluation and
    picked up from there.

    Step s always sees the same sequences, so a resumed run equals one that was never stopped.
    """
    return Trainer(model, task, options, learning_rate, seed).run(checkpoints, report)


class Trainer:
    """One run: the optimizer, the data of the current block, and how far it is."""

    def __init__(self, model: Decoder, task: Task, options: TrainOptions, learning_rate: float, seed: int):
        self.device = next(model.parameters()).device
        if options.dtype == "bfloat16" and self.device.type != "cpu":
            check_products(torch.bfloat16, str(self.device))
        elif options.dtype == "bfloat16" and not bfloat16_works():
            raise AttngapError(
                "train: products in bfloat16 crash this machine's torch. Use dtype float32, or set the environment "
                "variable ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 before Python starts"
            )
        self.model, self.task, self.options = model, task, options
        self.learning_rate, self.seed = learning_rate, seed
        self.parameters = list(model.parameters())
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=learning_rate, betas=(0.9, 0.98), weight_decay=options.weight_decay, fused=True
        )
        self.progress = checkpoint.Progress()
        self.block: tuple[int, Batch] | None = None

    def run(self, checkpoints: Path | None = None, report: Report | None = None) -> Trained:
        self.progress = checkpoint.load(checkpoints, self.model, self.optimizer) or self.progress
        held_out = self.task.sample(self.options.validation, stream("validation", 0), "validation")
        losses: list[float] = []
        start, cpu = time.perf_counter(), time.process_time()
        while not self.progress.finished:
            loss = self.step(self.progress.step)
            losses.append(loss)
            self.progress.step += 1
            diverged = not math.isfinite(loss)
            last = diverged or self.progress.step == self.options.steps
            if last or self.progress.step % self.options.evaluate_every == 0:
                score = math.nan if diverged else evaluate(self.model, self.task, held_out, self.options)
                self.progress.seconds += time.perf_counter() - start
                self.progress.cpu_seconds += time.process_time() - cpu
                self._record(sum(losses) / len(losses), score, last)
                checkpoint.save(checkpoints, self.model, self.optimizer, self.progress)
                losses, start, cpu = [], time.perf_counter(), time.process_time()
            if report is not None:
                report(self.progress.step, loss, self.progress.curve[-1][2] if self.progress.curve else None)
        return self._result()

    def step(self, step: int) -> float:
        """One update; returns its loss, not finite when the numbers have run away."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate * self.options.rate(step)
        batch = self.batch(step).to(self.device)
        try:
            with _precision(self.options, self.device):
                loss = loss_of(self.task, self.model(batch.inputs, batch.where), batch)
        except AttngapError:
            if step == 0:
                raise
            return math.nan  # sizes fitted at the first step: only NaN or infinity can be refused now
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, self.options.clip)
        self.optimizer.step()
        return loss.item()

    def batch(self, step: int) -> Batch:
        """The sequences of a step, drawn with those of its neighbors."""
        index, offset = divmod(step, BLOCK)
        if self.block is None or self.block[0] != index:
            count = self.options.batch * BLOCK
            self.block = index, self.task.sample(count, stream("train", self.seed, index), "train")
        return self.block[1][offset * self.options.batch : (offset + 1) * self.options.batch]

    def _record(self, loss: float, score: float, last: bool) -> None:
        self.progress.diverged = not (math.isfinite(loss) and math.isfinite(score))
        if not self.progress.diverged:
            self.progress.curve.append((self.progress.step, loss, score))
        solved = self.options.stop_at_solved and self.task.solved(score)
        self.progress.finished = last or self.progress.diverged or solved

    def _result(self) -> Trained:
        progress, task, options = self.progress, self.task, self.options
        score = None
        if not progress.diverged:
            score = evaluate(self.model, task, task.sample(options.test, stream("test", 0), "test"), options)
        _, loss, validation = progress.curve[-1] if progress.curve else (0, None, None)
        return Trained(
            score=score,
            validation=validation,
            loss=loss,
            steps=progress.step,
            solved=score is not None and task.solved(score),
            seconds=progress.seconds,
            cpu_seconds=progress.cpu_seconds,
            tokens_per_second=progress.step * options.batch * task.tokens / max(progress.seconds, 1e-9),
            curve=progress.curve,
        )


def loss_of(task: Task, outputs: Tensor, batch: Batch) -> Tensor:
    """Cross entropy for classes, squared error for numbers."""
    if task.outputs == 1:
        return F.mse_loss(outputs.squeeze(-1).float(), batch.targets)
    return F.cross_entropy(outputs.flatten(0, 1).float(), batch.targets.flatten())


@torch.no_grad()
def evaluate(model: Decoder, task: Task, batch: Batch, options: TrainOptions) -> float:
    """The task's score on `batch`, in pieces of the training batch. Graded on the CPU, in double precision."""
    scores, device = [], next(model.parameters()).device
    for start in range(0, len(batch), options.batch):
        piece = batch[start : start + options.batch]
        with _precision(options, device):
            outputs = model(piece.inputs.to(device), piece.where.to(device))
        scores.append(task.grade(outputs.float().cpu(), piece) * len(piece))
    return sum(scores) / len(batch)


def _precision(options: TrainOptions, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    if options.dtype == "float32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


@functools.cache
def bfloat16_works() -> bool:
    """Tried in a process of its own: where the processor offers AMX and the system forbids it, it dies of it."""
    script = "import torch; x = torch.ones(64, 64, dtype=torch.bfloat16); torch.nn.functional.linear(x, x)"
    return subprocess.run([sys.executable, "-c", script], capture_output=True).returncode == 0
