"""Fit all replacements together against the original's own predictions, because errors add up along the layers."""

import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from attngap.models.fisher import frozen
from attngap.models.swap import CHILD
from attngap.storage.checkpoint import Checkpoint

CHECK = 4  # steps between pieces that a killed run resumes from
WARM = 4  # steps until the full rate
ROWS = 64  # tokens of logits handled at once


def outputs(model: PreTrainedModel, tokens: Int[Tensor, "b t"], last: int | None = None) -> Tensor:
    """Logits, of the `last` tokens only where that is said; or an encoder's last hidden states."""
    options: dict[str, Any] = {} if getattr(model.config, "use_cache", None) is None else {"use_cache": False}
    if last is not None and "logits_to_keep" in inspect.signature(model.forward).parameters:
        options["logits_to_keep"] = last
    result = model(input_ids=tokens, **options)
    logits = getattr(result, "logits", None)
    return result.last_hidden_state if logits is None else logits if last is None else logits[:, -last:]


def divergence(student: Tensor, teacher: Tensor, *, labels: bool) -> Float[Tensor, ""]:
    """Mean KL(teacher || student) in nats a token; for an encoder the relative squared error of its hidden states."""
    if not labels:
        return (student - teacher).square().sum() / teacher.square().sum()
    return _Divergence.apply(student.flatten(0, 1), teacher.flatten(0, 1))


class _Divergence(torch.autograd.Function):
    """KL(teacher || student), a mean over rows; the gradient p_student - p_teacher is made on the way.

    Autograd would keep the logarithms of all probabilities of both for it: at 1024 tokens of a vocabulary of 50,000
    that is 400 MB to write and read again.
    """

    @staticmethod
    def forward(ctx, student: Tensor, teacher: Tensor) -> Tensor:
        wanted = ctx.needs_input_grad[0]
        gradient = torch.empty_like(student) if wanted else None
        total = torch.zeros((), dtype=torch.float64)
        for start in range(0, len(student), ROWS):
            rows = slice(start, start + ROWS)
            ours, theirs = (x[rows].float().log_softmax(-1) for x in (student, teacher))
            odds = theirs.exp()
            total += odds.flatten().dot(theirs.sub_(ours).flatten()).double()
            if gradient is not None:
                torch.sub(ours.exp_(), odds, out=gradient[rows]).div_(len(student))
        ctx.gradient = gradient
        return (total / len(student)).to(student.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, *scale: Tensor):
        gradient: Tensor = ctx.gradient
        return gradient if bool(scale[0] == 1) else gradient * scale[0], None


class Judge:
    """The divergence on some passages, which the original reads once.

    The first `exact` tokens of a passage are left out where others follow: no replacement changes them.
    """

    @torch.no_grad()
    def __init__(self, original: PreTrainedModel, passages: Int[Tensor, "count context"], exact: int = 0):
        self.passages = passages
        self.labels = original.get_output_embeddings() is not None
        context = passages.shape[1]
        self._last = context - exact if self.labels and 0 < exact < context else None
        # float16 halves 200 MB a passage; logits of 30 are rounded by 0.01, a divergence by less than 0.0001.
        kept = torch.float16 if self.labels else torch.float32
        self._teachers = [self.read(original, passage[None]).to(kept) for passage in passages]

    def read(self, model: PreTrainedModel, tokens: Int[Tensor, "1 context"]) -> Tensor:
        """What a model makes of a passage of this length, where replacements can change it."""
        return outputs(model, tokens, self._last)

    def pairs(self) -> Iterator[tuple[Int[Tensor, "1 context"], Tensor]]:
        """Each passage and what the original makes of it."""
        for passage, teacher in zip(self.passages, self._teachers, strict=True):
            yield passage[None], teacher.float()

    @torch.no_grad()
    def __call__(self, converted: PreTrainedModel) -> Float[Tensor, " count"]:
        losses = [
            divergence(self.read(converted, passage), teacher, labels=self.labels) for passage, teacher in self.pairs()
        ]
        return torch.stack(losses)


def together(losses: Float[Tensor, " count"]) -> float:
    """The geometric mean, so that halving the damage to recall counts as much as halving that to text."""
    return float(losses.double().clamp(min=1e-9).log().mean().exp())


def fit_jointly(
    original: PreTrainedModel,
    converted: PreTrainedModel,
    passages: Int[Tensor, "steps context"],
    judge: Judge,
    *,
    rate: float,
    checkpoint: Checkpoint,
    advance: Callable[..., None],
) -> tuple[float, float]:
    """Train the converted model's own parameters in place, a passage a step; the judge's divergence before and after.

    It is the geometric mean over its passages. Where it has risen, the parameters are as they were before.
    """
    trained = trainable(converted)
    optimizer = torch.optim.Adam(trained.values(), lr=rate)
    begun = _copy(trained)
    resumed = checkpoint.get("joint")
    start, before = (0, together(judge(converted))) if resumed is None else _resume(resumed, trained, optimizer)
    advance(start)
    with frozen(converted, but=trained.values()):
        for step, passage in enumerate(passages[start:, None], start):
            for group in optimizer.param_groups:
                group["lr"] = rate * _pace(step, len(passages))
            with torch.no_grad():
                teacher = judge.read(original, passage)
            optimizer.zero_grad()
            loss = divergence(judge.read(converted, passage), teacher, labels=judge.labels)
            loss.backward()
            optimizer.step()
            advance(note=f"divergence {loss.item():.4f}")
            if (step + 1) % CHECK == 0:
                checkpoint.put("joint", _pack(step + 1, before, trained, optimizer))
    after = together(judge(converted))
    with torch.no_grad():
        for name, p in trained.items():
            p.grad = None
            if after > before:
                p.copy_(begun[name])
    return before, min(before, after)


def _pace(step: int, steps: int) -> float:
    """Up over the first few steps, then down half a cosine."""
    return min(1.0, (step + 1) / WARM) * (1 + math.cos(math.pi * step / steps)) / 2


def trainable(model: PreTrainedModel) -> dict[str, Tensor]:
    """The replacements' parameters, and LoRA's where there are any."""
    return {name: p for name, p in model.named_parameters() if f".{CHILD}." in name or ".lora_" in name}


def _copy(trained: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in trained.items()}


def _pack(step: int, before: float, trained: dict[str, Tensor], optimizer) -> dict[str, Tensor]:
    packed = {"progress": torch.tensor([step, before], dtype=torch.float64)}
    for name, p in trained.items():
        packed[f"now/{name}"] = p
        if p in optimizer.state:  # Adam has none for what no gradient has reached yet
            moments = optimizer.state[p]
            packed |= {f"first/{name}": moments["exp_avg"], f"second/{name}": moments["exp_avg_sq"]}
    return packed


def _resume(packed: dict[str, Tensor], trained: dict[str, Tensor], optimizer) -> tuple[int, float]:
    step, before = packed["progress"].tolist()
    with torch.no_grad():
        for name, p in trained.items():
            p.copy_(packed[f"now/{name}"])
            if f"first/{name}" in packed:
                moments = {"exp_avg": packed[f"first/{name}"], "exp_avg_sq": packed[f"second/{name}"]}
                optimizer.state[p] = {"step": torch.tensor(float(step)), **moments}
    return int(step), before
