"""Write a file whole or not at all."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from attngap.errors import AttngapError


def write_atomically(
    path: Path,
    write: Callable[[Path], Any],
    *,
    lasting: bool = True,
    hint: str = "Make room and run the same command again",
) -> None:
    """Write a draft beside `path`, then rename it: a reader finds the old file, the new one or none, never half of one.

    A `lasting` file also survives a power failure; leave that out for what can be computed again.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    try:
        write(draft)
        if lasting:
            flush(draft)
        os.replace(draft, path)
        if lasting:
            flush(path.parent)
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or error  # without the number and the draft's name
        raise AttngapError(f"Cannot write '{path}': {why}. {hint}") from error
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)


def write_text(path: Path, text: str, *, hint: str = "Choose another place") -> None:
    """A text file, whole or not at all."""
    write_atomically(path, lambda draft: draft.write_text(text, encoding="utf-8"), hint=hint)


def flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk itself."""
    if os.name == "nt" and path.is_dir():  # Windows does not open folders
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def drop_drafts(folder: Path) -> None:
    """Remove drafts of processes that were killed while they wrote into the folder."""
    for path in folder.glob(".*.draft"):
        if not is_running(path.name.split(".")[-2]):
            path.unlink(missing_ok=True)


def is_running(process: str) -> bool:
    """Whether a draft's process may still write it; a name that is no process is somebody else's."""
    if not process.isdecimal() or os.name == "nt":  # there, asking for a process by signal would end it
        return True
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # somebody else's process, or no possible one
        return True
    return True
