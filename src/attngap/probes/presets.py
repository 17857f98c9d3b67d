"""Sizes at which a run takes seconds on a CPU, softmax solves the task and normalized linear attention does not."""

import dataclasses
from typing import Any

from attngap.errors import unknown


@dataclasses.dataclass(frozen=True)
class Preset:
    """Options of a task, its model and its training, and the learning rates to try."""

    task: dict[str, Any]
    model: dict[str, Any]
    train: dict[str, Any]
    learning_rates: tuple[float, ...] = (4e-3,)
    agreement: str = ""  # how the ranking of mechanisms here compares with the published one


PRESETS: dict[str, Preset] = {
    "mqar": Preset(
        task={"length": 64, "pairs": 16, "vocabulary": 256},
        model={"width": 32, "heads": 2, "layers": 1, "conv": 3},
        train={"steps": 1000, "batch": 64},
    ),
    "copy": Preset(
        task={"items": 24, "symbols": 32},
        model={"width": 64, "heads": 4, "layers": 2, "positions": "rotary"},
        train={"steps": 1000, "batch": 64},
    ),
    "selective-copy": Preset(
        task={"length": 48, "items": 12, "symbols": 64},
        model={"width": 64, "heads": 4, "layers": 2},
        train={"steps": 1000, "batch": 64},
    ),
    "induction": Preset(
        task={"passage": 24, "queries": 12, "vocabulary": 128},
        model={"width": 64, "heads": 4, "layers": 1},
        train={"steps": 1000, "batch": 64},
    ),
    "needle": Preset(
        task={"rows": 128, "kinds": 16},
        model={"width": 32, "heads": 1, "layers": 1, "conv": 0},
        train={"steps": 1000, "batch": 64},
    ),
    "icl-regression": Preset(
        task={"dim": 4, "points": 24},
        model={"width": 64, "heads": 4, "layers": 2, "mlp": 2},
        train={"steps": 1000, "batch": 64},
    ),
    "single-location": Preset(
        task={"dim": 16, "length": 64},
        model={"width": 32, "heads": 1, "layers": 1, "conv": 0},
        train={"steps": 1000, "batch": 64},
    ),
    "fuzzy-recall": Preset(
        task={"pairs": 8},
        model={"width": 64, "heads": 4, "layers": 2},
        train={"steps": 1000, "batch": 64},
    ),
    "text": Preset(
        task={"length": 128},
        model={"width": 96, "heads": 4, "layers": 2, "mlp": 2},
        train={"steps": 600, "batch": 16},
    ),
}


def preset(task: str) -> Preset:
    if task not in PRESETS:
        raise unknown("task", task, PRESETS, hint="List them: attngap probe list")
    return PRESETS[task]
