"""Real replacements on passages that no score has seen: the worst heads alone, and many heads at once.

The first give the worst heads' damage its size, which second order cannot; plans predict from the second, for errors of
many heads interact.
"""

from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from attngap.diagnosis.prediction import Joint
from attngap.diagnosis.replaced import divergence, predictions, replaced_predictions, replacement_losses
from attngap.diagnosis.result import Diagnosis, Head
from attngap.diagnosis.run import DiagnosisRun
from attngap.diagnosis.tasks import Task, performing
from attngap.heads.forward import forward, predicts_next
from attngap.options import GRANULARITY
from attngap.progress import Advance, progress

# Heads whose damage on recall is measured. Nearly all of it is theirs, and there second order says half of the truth: a
# prediction that was certain has no curvature until it is lost.
WORST = 10
SHARES = (0.0, 0.05, 0.15, 0.4)  # kept when many heads are replaced at once; what lies between follows a power law
TEXT_PASSAGES = 4  # each share is measured on two of them, for passages differ more than shares do
RECALL_PASSAGES = 2
Job = tuple[Any, int, Tensor, list[int]]  # a kind of passage, its number, the passage, which shares


def can_measure(run: DiagnosisRun, heads: Iterable[Head]) -> bool:
    """Whether there are tokens to predict, text that no score has seen, and heads to replace."""
    return bool(run.fresh) and predicts_next(run.model) and any(head.damage is not None for head in heads)


@torch.no_grad()
def measure_worst(run: DiagnosisRun, heads: list[Head]) -> None:
    """Set `recall_damage` of the worst heads to what replacing them costs on a fresh stress passage.

    The estimate stays in `recall_estimate`, and what would remain at each rank keeps its share of the damage.
    """
    hurt = [head for head in heads if head.recall_damage]
    worst = sorted(hurt, key=lambda head: -(head.recall_damage or 0.0))[:WORST]
    with progress("replacing the worst heads", len(worst), quiet=run.quiet) as advance:
        losses = replacement_losses(run, "worst", run.fresh_stress[0], worst, advance)
    for head, loss in zip(worst, losses, strict=True):
        _set_recall(head, loss)


def _set_recall(head: Head, measured: float) -> None:
    estimate = head.recall_damage or 0.0
    ratio = measured / estimate if estimate else 1.0
    head.recall_estimate, head.recall_damage = estimate, measured
    if head.recall_unavoidables is not None:
        head.recall_unavoidables = [ratio * each for each in head.recall_unavoidables]
    if head.recall_unavoidable is not None:
        head.recall_unavoidable *= ratio
        head.recall_lost = measured - head.recall_unavoidable


def measure_together(run: DiagnosisRun, result: Diagnosis) -> list[Joint]:
    """Replace all heads but those that plans of a few shares keep: on two passages of text each, and on repeats."""
    able = [head for head in result.heads if head.replaceable]
    kept = [set(result.plan(share, GRANULARITY).keep) for share in SHARES]
    lost = [[head for head in able if (head.layer, head.head) not in each] for each in kept]
    every = list(range(len(SHARES)))
    jobs: list[Job] = [("text", place, tokens, _turns(len(run.fresh), place)) for place, tokens in enumerate(run.fresh)]
    jobs += [("recall", place, tokens, every) for place, tokens in enumerate(run.fresh_stress)]
    _measure_missing(run, jobs, lost)
    found = []
    for kind, place, _, numbers in jobs:
        for number in numbers:
            measured = {key: float(x) for key, x in run.checkpoint.require(_name(kind, place, number)).items()}
            damage = sum((h.damage if kind == "text" else h.recall_damage) or 0.0 for h in lost[number])
            left = len(able) - len(lost[number])
            found.append(Joint(kind=kind, passage=place, kept=left, damage=damage, **measured))
    return found


def _measure_missing(run: DiagnosisRun, jobs: list[Job], lost: list[list[Head]]) -> None:
    with (
        progress("replacing many heads at once", sum(len(each[-1]) for each in jobs), quiet=run.quiet) as advance,
        performing(run, advance) as perform,
    ):
        for kind, place, tokens, numbers in jobs:
            names = {_name(kind, place, number): lost[number] for number in numbers}
            todo = {name: heads for name, heads in names.items() if not run.checkpoint.has(name)}
            advance(len(names) - len(todo))
            if todo:
                note, period = f"{kind}, passage {place}", run.period if kind == "recall" else None
                perform(Task(_measure, (tokens, todo, period), note=note, steps=len(todo), fits=True))


def _name(kind: str, place: int, number: int) -> str:
    return f"joint-{kind}-{place}-{number}"


def _turns(passages: int, place: int) -> list[int]:
    """Which shares are measured on this passage, so that each is on two of several."""
    return [number for number in range(len(SHARES)) if passages < 3 or (number - place) % passages in (0, 1)]


@torch.no_grad()
def _measure(
    run: DiagnosisRun, tokens: Int[Tensor, "1 t"], lost: dict[str, list[Head]], period: int | None, advance: Advance
) -> None:
    """The heads of several pieces replaced on one passage, so that the untouched model reads it once."""
    before = predictions(forward(run.model, tokens))
    for name, each in lost.items():
        heads: dict[int, list[int]] = {}
        for head in each:
            heads.setdefault(head.layer, []).append(head.head)
        after = replaced_predictions(run, tokens, heads)
        run.checkpoint.put(name, compare(before, after, tokens, period))
        advance(note=f"{len(each)} heads replaced")


def compare(before: Tensor, after: Tensor, tokens: Int[Tensor, "1 t"], period: int | None = None) -> dict[str, Tensor]:
    """Divergence, log-ratio of perplexities and its tokens' deviation; of a repeated sequence what was predicted."""
    labels = tokens[0, 1:, None]
    lost = (before[:-1].gather(-1, labels) - after[:-1].gather(-1, labels))[:, 0]
    found = {"divergence": divergence(before, after), "log_ratio": lost.mean(), "deviation": lost.std()}
    if period is not None:
        second = slice(len(lost) - period, None)
        for name, each in (("original", before), ("recalled", after)):
            found[name] = (each[:-1].argmax(-1, keepdim=True) == labels)[second].float().mean()
    return found
