"""Attention patterns kept beside a diagnosis, brought down to what a page can carry."""

import dataclasses
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from attngap.errors import AttngapError

BUDGET = 2_600_000  # cells of all pictures together
LEVELS = 64
UNPACKED = 256_000_000  # bytes: ten thousand heads with two pictures of 64 x 64 take 82 million
CAPTIONS = {"text": "on a passage of real text", "stress": "on a random sequence that repeats"}


@dataclasses.dataclass(frozen=True)
class Patterns:
    """Pictures by passage, each `(heads, side, side)` bytes: square roots of the largest weight in a cell."""

    pictures: dict[str, np.ndarray]
    tokens: int

    def passages(self) -> Sequence[dict[str, Any]]:
        """What each picture was taken on, for the page."""
        found = []
        for name, stack in self.pictures.items():
            side = stack.shape[-1]
            cell = self.tokens / side
            width = f"{cell:.0f}" if cell == round(cell) else f"{cell:.1f}"
            about = f"Attention {CAPTIONS.get(name, name)}, {self.tokens} tokens; a row is a query, a column a key"
            caption = f"{about}. Each cell: the largest weight among {width} x {width}." if cell > 1 else f"{about}."
            found.append({"name": name, "side": side, "cell": cell, "caption": caption})
        return found

    def cells(self) -> bytes:
        """All pictures, passage by passage and head by head, in LEVELS shades: a third smaller, to the eye the same."""
        return b"".join((stack // (256 // LEVELS)).tobytes() for stack in self.pictures.values())


def read_patterns(path: Path, heads: int, tokens: int) -> Patterns | None:
    """The pictures beside `diagnosis.json`, None where there are none (--quick).

    Coarser by taking the largest weight again: the largest of the largest is still the largest weight of the cell.
    """
    file = path.with_name("patterns.npz")
    if not file.is_file():
        return None
    try:
        check_size(file)
        with file.open("rb") as opened, np.load(opened, allow_pickle=False) as stored:
            pictures = {name: stored[name] for name in stored.files}
    except (OSError, ValueError, LookupError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise AttngapError(f"'{file}' is cut off or damaged: {error}. Run attngap diagnose again: it resumes") from None
    for name, stack in pictures.items():
        if stack.ndim != 3 or len(stack) != heads or stack.shape[1] != stack.shape[2]:
            raise AttngapError(f"'{file}' does not fit its diagnosis: {name} is {stack.shape}, heads are {heads}")
    while sum(stack.size for stack in pictures.values()) > BUDGET:
        pictures = {name: _halve(stack) for name, stack in pictures.items()}
    return Patterns(pictures, tokens)


def check_size(file: Path) -> None:
    """Refuse what would unpack to far more than pictures of heads: a few megabytes can hide gigabytes."""
    with zipfile.ZipFile(file) as archive:
        size = sum(member.file_size for member in archive.infolist())
    if size > UNPACKED:
        raise AttngapError(
            f"'{file}' would unpack to {size / 1e6:,.0f} MB; pictures of heads take at most {UNPACKED / 1e6:,.0f}. "
            "Delete it, or diagnose the model again"
        )


def _halve(stack: np.ndarray) -> np.ndarray:
    """(h, s, s) -> (h, s/2, s/2), the largest of each two by two; an odd last row stands alone."""
    odd = stack.shape[-1] % 2
    stack = np.pad(stack, ((0, 0), (0, odd), (0, odd)))
    h, s, _ = stack.shape
    return stack.reshape(h, s // 2, 2, s // 2, 2).max((2, 4))
