"""What our mechanisms claim about themselves and what tasks are called, written down: showing them need not wait for
torch.

`tools/reference.py` writes `facts.json` from the classes; a test fails when it no longer says what they say.
"""

import functools
import json
from importlib.metadata import entry_points
from importlib.resources import files
from typing import Any

GROUP = "attngap.mechanisms"


@functools.cache
def _facts() -> dict[str, Any]:
    return json.loads(files("attngap.cli").joinpath("facts.json").read_text(encoding="utf-8"))


def known() -> dict[str, dict[str, Any]]:
    """Name to record of our own mechanisms, in the order of the catalogue."""
    return {record["name"]: record for record in _facts()["mechanisms"]}


def mechanism_names() -> list[str]:
    """Ours, then those that other packages register: the names of `attngap.catalogue()`."""
    ours = known()
    return [*ours, *dict.fromkeys(point.name for point in entry_points(group=GROUP) if point.name not in ours)]


def task_names() -> list[str]:
    return list(_facts()["tasks"])
