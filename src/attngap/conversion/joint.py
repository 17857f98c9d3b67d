"""Fit all replacements together against the original's own predictions, because errors add up along the layers."""

import math
from collections.abc import Callable, Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from attngap.heads import forward
from attngap.heads.damage import frozen, label_directions, random_directions
from attngap.models.twin import CHILD
from attngap.storage.checkpoint import Checkpoint

CHECK = 4  # steps between pieces that a killed run resumes from
WARM = 4  # steps until the full rate
ROWS = 64  # tokens of logits handled at once


def divergence(student: Tensor, teacher: Tensor, *, is_language_model: bool) -> Float[Tensor, ""]:
    """Mean KL(teacher || student) in nats per token; for an encoder the relative squared error of its hidden states."""
    if not is_language_model:
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
        total = torch.zeros((), dtype=torch.float64)  # on the CPU: not every accelerator has double precision
        for start in range(0, len(student), ROWS):
            rows = slice(start, start + ROWS)
            ours, theirs = (x[rows].float().log_softmax(-1) for x in (student, teacher))
            odds = theirs.exp()
            total += odds.flatten().dot(theirs.sub_(ours).flatten()).cpu().double()
            if gradient is not None:
                torch.sub(ours.exp_(), odds, out=gradient[rows]).div_(len(student))
        ctx.gradient = gradient
        return (total / len(student)).to(student.device, torch.promote_types(student.dtype, torch.float32))

    @staticmethod
    @once_differentiable
    def backward(ctx, *scale: Tensor):
        gradient: Tensor = ctx.gradient
        return gradient if bool(scale[0] == 1) else gradient * scale[0], None


class Reference:
    """What the original makes of some passages: the divergence of a converted model is measured against it.

    The first `exact` tokens of a passage are left out where others follow: no replacement changes them.
    """

    @torch.no_grad()
    def __init__(self, original: PreTrainedModel, passages: Int[Tensor, "count context"], exact: int = 0):
        self.passages = passages
        self.is_language_model = forward.is_language_model(original)
        context = passages.shape[1]
        self._last = context - exact if self.is_language_model and 0 < exact < context else None
        self._rows = context if self._last is None else self._last
        # float16 halves 200 MB a passage; logits of 30 are rounded by 0.01, a divergence by less than 0.0001.
        kept = torch.float16 if self.is_language_model else torch.float32
        self._teachers = [self.outputs(original, passage[None]).to(kept) for passage in passages]

    def outputs(self, model: PreTrainedModel, tokens: Int[Tensor, "1 context"]) -> Tensor:
        """What a model makes of a passage of this length, where replacements can change it."""
        return forward.outputs(model, tokens, self._last)

    def pairs(self) -> Iterator[tuple[Int[Tensor, "1 context"], Tensor]]:
        """Each passage and what the original makes of it."""
        for passage, teacher in zip(self.passages, self._teachers, strict=True):
            yield passage[None], teacher.float()

    def loss(self, converted: PreTrainedModel, passage: Int[Tensor, "1 context"], teacher: Tensor) -> Float[Tensor, ""]:
        """The divergence on one passage, of which the original makes `teacher`."""
        return divergence(self.outputs(converted, passage), teacher, is_language_model=self.is_language_model)

    def directions(self, output: Tensor, generator: torch.Generator) -> Iterator[Tensor]:
        """One random cotangent whose covariance is the curvature of the divergence at the model's own output."""
        if self.is_language_model:
            return label_directions(output, generator)
        size = output.square().sum().sqrt()
        return (direction / size for direction in random_directions(output, generator))

    def information(self, projected: Float[Tensor, "h t"]) -> Float[Tensor, " h"]:
        """Half the second derivative of the divergence in each head's share, from projections on one direction."""
        if not self.is_language_model:
            return projected.sum(-1).square()
        # Labels of different tokens are independent, so squares add up over tokens.
        return projected.square().sum(-1) / self._rows / 2

    @torch.no_grad()
    def divergence(self, converted: PreTrainedModel) -> Float[Tensor, " count"]:
        """Of a converted model on each passage."""
        losses = [self.loss(converted, passage, teacher) for passage, teacher in self.pairs()]
        return torch.stack(losses)


def geometric_mean(losses: Float[Tensor, " count"]) -> float:
    """The one number a choice goes by: so halving the damage to recall counts as much as halving that to text."""
    return float(losses.double().clamp(min=1e-9).log().mean().exp())


def fit_jointly(
    original: PreTrainedModel,
    converted: PreTrainedModel,
    passages: Int[Tensor, "steps context"],
    reference: Reference,
    *,
    rate: float,
    checkpoint: Checkpoint,
    advance: Callable[..., None],
) -> tuple[float, float]:
    """Train the converted model's own parameters in place, one passage per step; the divergence before and after.

    It is the geometric mean over its passages. Where it has risen, the parameters are as they were before.
    """
    trained = trainable(converted)
    optimizer = torch.optim.Adam(trained.values(), lr=rate)
    begun = _copy(trained)
    resumed = checkpoint.get("joint")
    if resumed is None:
        start, before = 0, geometric_mean(reference.divergence(converted))
    else:
        start, before = _resume(resumed, trained, optimizer)
    advance(start)
    with frozen(converted, but=trained.values()):
        for step, passage in enumerate(passages[start:, None], start):
            for group in optimizer.param_groups:
                group["lr"] = rate * pace(step, len(passages))
            with torch.no_grad():
                teacher = reference.outputs(original, passage)
            optimizer.zero_grad()
            loss = reference.loss(converted, passage, teacher)
            loss.backward()
            optimizer.step()
            advance(note=f"divergence {loss.item():.4f}")
            if (step + 1) % CHECK == 0:
                checkpoint.put("joint", _pack(step + 1, before, trained, optimizer))
    after = geometric_mean(reference.divergence(converted))
    with torch.no_grad():
        for name, p in trained.items():
            p.grad = None
            if after > before:
                p.copy_(begun[name])
    return before, min(before, after)


def pace(step: int, steps: int) -> float:
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
                kept = {"exp_avg": packed[f"first/{name}"], "exp_avg_sq": packed[f"second/{name}"]}
                moments = {key: x.to(p.device) for key, x in kept.items()}
                optimizer.state[p] = {"step": torch.tensor(float(step)), **moments}
    return int(step), before
