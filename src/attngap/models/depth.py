"""Counts in a config that its weights cannot fill: a model of a billion layers would be built for ever."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from attngap.errors import AttngapError

LAYERS = re.compile(r"(\w+_)?layers?")  # num_hidden_layers, n_layer, encoder_layers
PARTS = re.compile(r"(\w+_)?(experts|blocks)")
MOST = 100_000  # of what has no tensor of its own: Doge's 16,384 experts are the rows of two
SHARED = 100  # layers that may share their weights (ALBERT)


def check_depth(folder: Path) -> None:
    """Before transformers reads the config, which may make lists as long as the model is deep."""
    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        tensors = [safe_open(path, "pt").keys() for path in folder.glob("*.safetensors") if path.is_file()]
    except (OSError, ValueError, RecursionError, SafetensorError):
        return  # whoever reads it says what is wrong
    held = sum(map(len, tensors))
    for key, count in _numbers(content):
        by_weights = bool(tensors) and LAYERS.fullmatch(key) is not None
        most = SHARED + held if by_weights else MOST
        if count > most and (LAYERS.fullmatch(key) or PARTS.fullmatch(key)):
            there = f"its weights are {held} tensors" if by_weights else f"no model has more than {most}"
            said = f"'{folder / 'config.json'}' says {key} {count}, and {there}"
            raise AttngapError(f"{said}. Get the config and the weights of one model")


def _numbers(content: Any) -> Iterator[tuple[str, int | float]]:
    """Every number in it, with its name."""
    for key, value in content.items() if isinstance(content, dict) else ():
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield key, value
        else:
            yield from _numbers(value)
