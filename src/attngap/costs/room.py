"""Whether there is memory for a run, asked before anything is loaded."""

import contextlib
from typing import Any

import torch

from attngap.conversion.options import ConversionOptions
from attngap.costs.memory import HALF, conversion_space, diagnosis_space
from attngap.costs.shape import shape_of
from attngap.diagnosis.options import DiagnosisOptions
from attngap.errors import AttngapError
from attngap.models.placement import memory_of

SURE = 0.7  # of what is estimated beyond the weights: estimates are good to three tenths


def check_room(
    model: str,
    options: DiagnosisOptions | ConversionOptions,
    *,
    dtype: Any,
    device: torch.device | None,
    max_memory: int | None = None,
) -> None:
    """Refuse a run that will not fit, with the number. A model whose sizes a config does not tell is let through."""
    place = device or torch.device("cpu")
    left = memory_of(place)
    shape = None
    with contextlib.suppress(AttngapError):
        shape = shape_of(model)
    if left is None or shape is None:
        return
    size = dtype.itemsize if isinstance(dtype, torch.dtype) else 2  # a checkpoint's own precision is half as a rule
    weights = shape.parameters * size
    held = weights if max_memory is None else min(weights, max_memory)
    if isinstance(options, DiagnosisOptions):
        space = diagnosis_space(shape, options, size)
    else:
        space = conversion_space(shape, options, size)
    if held + SURE * space.memory > left:
        narrower = "--dtype bfloat16, " if size > HALF else ""
        raise AttngapError(
            f"{model!r} needs about {(held + space.memory) / 1e9:.1f} GB of memory, {held / 1e9:.1f} of them for "
            f"weights; {place} has {left / 1e9:.1f} GB left. Take {narrower}--max-memory 4GB or fewer tokens"
        )
