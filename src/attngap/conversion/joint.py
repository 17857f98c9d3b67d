"""Fit all replacements together against the original's own predictions, because errors add up along the layers."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from attngap.conversion.work import Work
from attngap.models.swap import CHILD

CHECK = 8  # steps between looks at the held-out passages, and between pieces that a killed run resumes from
ROWS = 256  # tokens of logits handled at once


def outputs(model: PreTrainedModel, tokens: Int[Tensor, "b t"]) -> Tensor:
    """Logits, or an encoder's last hidden states."""
    cache = {} if getattr(model.config, "use_cache", None) is None else {"use_cache": False}
    result = model(input_ids=tokens, **cache)
    return result.logits if getattr(result, "logits", None) is not None else result.last_hidden_state


def divergence(student: Tensor, teacher: Tensor, *, labels: bool) -> Float[Tensor, ""]:
    """Mean KL(teacher || student) in nats a token; for an encoder the relative squared error of its hidden states."""
    if not labels:
        return (student - teacher).square().sum() / teacher.square().sum()
    student, teacher = student.flatten(0, 1), teacher.flatten(0, 1)
    parts = [
        F.kl_div(s.log_softmax(-1), t.log_softmax(-1), log_target=True, reduction="sum")
        for s, t in zip(student.split(ROWS), teacher.split(ROWS), strict=True)
    ]
    return torch.stack(parts).sum() / len(student)


def fit_jointly(
    original: PreTrainedModel,
    converted: PreTrainedModel,
    tokens: Int[Tensor, "count context"],
    *,
    steps: int,
    rate: float,
    heldout: int,
    seed: int,
    work: Work,
    advance: Callable[..., None],
) -> tuple[float, float]:
    """Train the converted model's own parameters in place; held-out divergence before and after.

    Ends with the parameters that did best on the last `heldout` passages, so it never makes them worse.
    """
    labels = converted.get_output_embeddings() is not None
    trained = trainable(converted)
    train = len(tokens) - heldout
    optimizer = torch.optim.Adam(trained.values(), lr=rate)
    generator = torch.Generator().manual_seed(seed)
    order = torch.cat([torch.randperm(train, generator=generator) for _ in range(-(-steps // train))])
    resumed = work.piece("joint")
    if resumed is not None:
        start, before, best_loss, best = _resume(resumed, trained, optimizer)
        advance(start)
    else:
        start, before = 0, _judge(original, converted, tokens[train:], labels)
        best_loss, best = before, _copy(trained)
    frozen = [p for p in converted.parameters() if p.requires_grad and not any(p is q for q in trained.values())]
    for p in frozen:
        p.requires_grad_(False)
    try:
        for step in range(start, steps):
            for group in optimizer.param_groups:
                group["lr"] = rate * min(1.0, (step + 1) / 4, (steps - step) / (0.7 * steps))
            passage = tokens[order[step]][None]
            with torch.no_grad():
                teacher = outputs(original, passage)
            optimizer.zero_grad()
            divergence(outputs(converted, passage), teacher, labels=labels).backward()
            optimizer.step()
            advance(note=f"best held-out {best_loss:.4f}")
            if (step + 1) % CHECK == 0 or step + 1 == steps:
                loss = _judge(original, converted, tokens[train:], labels)
                if loss < best_loss:
                    best_loss, best = loss, _copy(trained)
                work.keep("joint", _pack(step + 1, before, best_loss, best, trained, optimizer))
    finally:
        for p in frozen:
            p.requires_grad_(True)
    with torch.no_grad():
        for name, p in trained.items():
            p.copy_(best[name])
            p.grad = None
    return before, best_loss


def trainable(model: PreTrainedModel) -> dict[str, Tensor]:
    """The replacements' parameters, and LoRA's where there are any."""
    return {name: p for name, p in model.named_parameters() if f".{CHILD}." in name or ".lora_" in name}


@torch.no_grad()
def _judge(original: PreTrainedModel, converted: PreTrainedModel, tokens: Tensor, labels: bool) -> float:
    losses = [
        divergence(outputs(converted, passage[None]), outputs(original, passage[None]), labels=labels)
        for passage in tokens
    ]
    return float(torch.stack(losses).mean())


def _copy(trained: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in trained.items()}


def _pack(step: int, before: float, best_loss: float, best: dict, trained: dict, optimizer) -> dict[str, Tensor]:
    packed = {"progress": torch.tensor([step, before, best_loss], dtype=torch.float64)}
    for name, p in trained.items():
        packed |= {f"best/{name}": best[name], f"now/{name}": p}
        if p in optimizer.state:  # Adam has none for what no gradient has reached yet
            moments = optimizer.state[p]
            packed |= {f"first/{name}": moments["exp_avg"], f"second/{name}": moments["exp_avg_sq"]}
    return packed


def _resume(packed: dict[str, Tensor], trained: dict[str, Tensor], optimizer) -> tuple[int, float, float, dict]:
    step, before, best_loss = packed["progress"].tolist()
    with torch.no_grad():
        for name, p in trained.items():
            p.copy_(packed[f"now/{name}"])
            if f"first/{name}" in packed:
                moments = {"exp_avg": packed[f"first/{name}"], "exp_avg_sq": packed[f"second/{name}"]}
                optimizer.state[p] = {"step": torch.tensor(float(step)), **moments}
    return int(step), before, best_loss, {name: packed[f"best/{name}"] for name in trained}
