"""A run as plain data: everything that decides its numbers, and nothing else, so that its hash can name it."""

import dataclasses
import math
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from attngap.errors import AttngapError, unknown
from attngap.probes.mixers import match_state, parse
from attngap.probes.model import Decoder, ModelOptions
from attngap.probes.presets import preset
from attngap.probes.tasks.base import Task
from attngap.probes.tasks.catalogue import task as make_task
from attngap.probes.train import TrainOptions

# Raise it when tasks, model or trainer change so that old numbers no longer hold: old rows are then recomputed.
REVISION = 2

T = TypeVar("T", ModelOptions, TrainOptions)
Spec = dict[str, Any]


def make_spec(
    task: str,
    mechanism: str,
    *,
    seed: int = 0,
    learning_rate: float | None = None,
    task_options: Mapping[str, Any] | None = None,
    model: Mapping[str, Any] | None = None,
    train: Mapping[str, Any] | None = None,
    state: int | None = None,
) -> Spec:
    """The full spec of one run: the task's preset, changed by what is given. Defaults are written out.

    With `state` the model's head_dim is chosen so that its state has about that many floats.
    """
    start = preset(task)
    chosen = make_task(task, **{**start.task, **(task_options or {})})
    sizes = _options(ModelOptions, "model", {**start.model, **(model or {})})
    loop = _options(TrainOptions, "train", {**start.train, **(train or {})})
    if state is not None:
        sizes = match_state(mechanism, sizes, chosen.tokens, state)
    rate = start.learning_rates[0] if learning_rate is None else learning_rate
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate < math.inf:
        raise AttngapError(f"learning_rate must be a number above 0, got {rate!r}")
    return {
        "task": task,
        "task_options": chosen.options,
        "mechanism": mechanism,
        "model": dataclasses.asdict(sizes),
        "train": dataclasses.asdict(loop),
        "learning_rate": float(rate),
        "seed": int(seed),
        "revision": REVISION,
    }


def build(spec: Spec) -> tuple[Task, Decoder, TrainOptions]:
    """Task, untrained model and loop of a spec. The weights depend on torch's random state."""
    task = make_task(spec["task"], **spec["task_options"])
    decoder = Decoder(task, parse(spec["mechanism"]), ModelOptions(**spec["model"]))
    return task, decoder, TrainOptions(**spec["train"])


def _options(cls: type[T], label: str, given: Mapping[str, Any]) -> T:
    kinds = typing.get_type_hints(cls)
    for key, value in given.items():
        if key not in kinds:
            raise unknown(f"{label} option", key, kinds)
        kind = kinds[key]
        if kind not in (int, float, bool):
            continue  # a choice: the class itself says which
        fits = isinstance(value, (int, float) if kind is float else kind) and (
            kind is bool or not isinstance(value, bool)
        )
        if not fits:
            raise AttngapError(f"{label}: {key} must be {kind.__name__}, got {value!r}")
    return cls(**given)
