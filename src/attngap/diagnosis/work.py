"""The folder of a diagnosis while it is being made: finished pieces on disk, from which a killed run goes on."""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from attngap.errors import AttngapError

RESULT = "diagnosis.json"


class Work:
    """Pieces of one run, each a file written whole or not at all. A piece of another model or option never matches."""

    def __init__(self, folder: Path, key: dict[str, Any]):
        self.folder = folder / "work"
        self.key = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]

    def piece(self, name: str) -> dict[str, Tensor] | None:
        path = self._path(name)
        return load_file(path) if path.exists() else None

    def has(self, name: str) -> bool:
        return self._path(name).exists()

    def keep(self, name: str, tensors: dict[str, Tensor]) -> None:
        packed = {key: tensor.contiguous() for key, tensor in tensors.items()}
        write_atomically(self._path(name), lambda path: save_file(packed, path))

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.{self.key}.safetensors"


@contextlib.contextmanager
def workplace(directory: Path, key: dict[str, Any], *, overwrite: bool) -> Iterator[Work]:
    """Open the folder for one run; the pieces go when the run has finished, and stay when it has not."""
    work = Work(directory, key)
    if (directory / RESULT).exists() and not overwrite:
        raise AttngapError(f"'{directory}' already holds a diagnosis. Choose another folder, or pass --overwrite")
    strangers = (
        directory.is_dir() and any(directory.iterdir()) and not (work.folder.exists() or (directory / RESULT).exists())
    )
    if strangers:
        raise AttngapError(f"'{directory}' is not empty and not a diagnosis. Choose another folder")
    try:
        work.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise AttngapError(f"Cannot write to '{directory}': {error}. Choose another folder") from error
    with _locked(work.folder / "lock", directory):
        yield work
        shutil.rmtree(work.folder, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path, directory: Path) -> Iterator[None]:
    """Two runs in one folder would mix their pieces; the system frees the lock of a killed run."""
    try:
        import fcntl
    except ImportError:  # Windows: no advisory locks of this kind
        yield
        return
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise AttngapError(
                f"'{directory}' is in use by another run. Wait for it, or choose another folder"
            ) from error
        yield


def write_atomically(path: Path, write: Callable[[Path], Any]) -> None:
    """Write beside, then rename: a reader finds the old file, the new one or none, never half of one."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    try:
        write(draft)
        os.replace(draft, path)
    except (OSError, SafetensorError) as error:
        raise AttngapError(
            f"Cannot write '{path}': {error}. Make room and run the same command again: it resumes"
        ) from error
    finally:
        draft.unlink(missing_ok=True)
