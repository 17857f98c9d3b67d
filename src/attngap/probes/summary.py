"""Many runs, one line each: the best learning rate by validation, mean and confidence interval over seeds."""

import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

from attngap.errors import AttngapError
from attngap.storage.runs import Record

CONFIDENCE = 0.95


@dataclasses.dataclass(frozen=True)
class Summary:
    """A mechanism on a task at one set of sizes, over its seeds."""

    task: str
    mechanism: str
    metric: str
    mean: float | None  # None when no seed stayed finite
    half_width: float | None  # of the 95% confidence interval; None for fewer than two seeds
    scores: tuple[float | None, ...]  # one a seed
    chance: float
    best: float | None
    closed: float | None  # how far the mean is from chance (0) to best (1)
    predicted: float | None  # what theory predicts for a random memory of this state
    solved: int  # seeds that solved it
    learning_rate: float  # the one chosen
    learning_rates: tuple[float, ...]  # those tried
    parameters: int
    state_floats: int
    state_rank: int
    seconds: float  # mean over the seeds shown
    options: dict[str, Any]  # task_options, model and train


def summarize(records: Iterable[Record]) -> list[Summary]:
    """One summary for each task, mechanism and sizes, in the order of first appearance."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        spec = {k: v for k, v in record.spec.items() if k not in ("seed", "learning_rate")}
        groups.setdefault(json.dumps(spec, sort_keys=True), []).append(record)
    try:
        return [_summary(group) for group in groups.values()]
    except (LookupError, TypeError, ValueError, ArithmeticError) as error:
        raise AttngapError(
            f"A stored run is not as attngap writes it ({type(error).__name__}: {error}). Run the probe again"
        ) from error


def _summary(group: Sequence[Record]) -> Summary:
    by_rate: dict[float, list[Record]] = {}
    for record in group:
        by_rate.setdefault(record.spec["learning_rate"], []).append(record)
    higher = group[0].result["higher"]
    rate = min(sorted(by_rate), key=lambda rate: _regret(by_rate[rate], higher))
    chosen = sorted(by_rate[rate], key=lambda record: record.spec["seed"])
    first = chosen[0].result
    scores = tuple(record.result["score"] for record in chosen)
    finite = [score for score in scores if score is not None]
    mean = sum(finite) / len(finite) if finite else None
    best, chance = first["best"], first["chance"]
    return Summary(
        task=chosen[0].spec["task"],
        mechanism=chosen[0].spec["mechanism"],
        metric=first["metric"],
        mean=mean,
        half_width=half_width(finite),
        scores=scores,
        chance=chance,
        best=best,
        closed=None if best is None or mean is None else (mean - chance) / (best - chance),
        predicted=first["predicted"],
        solved=sum(record.result["solved"] for record in chosen),
        learning_rate=rate,
        learning_rates=tuple(sorted(by_rate)),
        parameters=first["parameters"],
        state_floats=first["state_floats"],
        state_rank=first["state_rank"],
        seconds=sum(record.result["seconds"] for record in chosen) / len(chosen),
        options={name: chosen[0].spec[name] for name in ("task_options", "model", "train")},
    )


def _regret(records: Sequence[Record], higher: bool) -> float:
    """Mean validation score, turned so that smaller is better; a run that diverged rules its learning rate out."""
    if any(record.result["score"] is None for record in records):
        return math.inf
    mean = sum(record.result["validation"] for record in records) / len(records)
    return -mean if higher else mean


def half_width(values: Sequence[float]) -> float | None:
    """Half of Student's 95% confidence interval of the mean.

    >>> round(half_width([1.0, 2.0, 3.0]), 3)
    2.484
    """
    if len(values) < 2:
        return None
    from scipy.stats import t

    mean = sum(values) / len(values)
    spread = math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
    return float(t.ppf((1 + CONFIDENCE) / 2, len(values) - 1) * spread / math.sqrt(len(values)))
