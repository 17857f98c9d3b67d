"""Files of scores of heads: a table of layers by groups, and the seconds it took.

Ours depend on how many tokens the other groups hold, so that there may be one for each of several windows.
"""

import json
from pathlib import Path

Scores = list[list[float]]


def scores_path(folder: Path, name: str, window: int | None = None) -> Path:
    """Where scores made at a window are written; without one, at the conversion's own."""
    return folder / (f"{name}-scores.json" if window is None else f"{name}-{window}-scores.json")


def nearest_scores(folder: Path, name: str, window: int | None = None) -> dict | None:
    """The scores made at the narrowest window that holds this one; else those of the conversion's own window."""
    made = {int(path.name.split("-")[1]) for path in folder.glob(f"{name}-*-scores.json")}
    wide = [each for each in made if window is not None and each >= window]
    path = scores_path(folder, name, min(wide, default=None))
    return json.loads(path.read_text()) if path.exists() else None


def read_scores(folder: Path, name: str, window: int | None = None) -> Scores | None:
    found = nearest_scores(folder, name, window)
    return None if found is None else found["groups"]
