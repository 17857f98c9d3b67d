"""Finished pieces of a run on disk, from which a killed run goes on."""

import contextlib
import hashlib
import json
import tempfile
import warnings
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from attngap.errors import AttngapError
from attngap.storage.files import write_atomically
from attngap.storage.lock import locked
from attngap.storage.pieces import Pieces

PIECES = ".attngap-work"  # in a folder of results: a name that a person would not give
MARKER, LOCK, SUFFIX = "made-by-attngap.txt", "lock", ".piece"
NOTICE = "Finished pieces of an attngap run. The same command goes on from them and removes them when it is done.\n"
DIGITS = 4  # bytes of the checksum that a piece begins with


class Checkpoint(Pieces):
    """Pieces of one run in a folder; a piece of another key (model, text, options) never matches."""

    def __init__(self, folder: Path, key: Mapping[str, Any]):
        self.folder = folder
        self.key = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
        self.resumed = False  # has a piece of an earlier run been used
        self._whole: set[str] = set()  # pieces that were written or read by this run

    def get(self, name: str) -> dict[str, Tensor] | None:
        """The piece, or None when there is none; a damaged one is dropped, so that it is computed again."""
        path = self._path(name)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        if zlib.crc32(data[DIGITS:]).to_bytes(DIGITS, "little") != data[:DIGITS]:
            warnings.warn(f"The piece '{path}' is damaged; it is dropped and computed again", stacklevel=2)
            path.unlink(missing_ok=True)
            self._whole.discard(name)
            return None
        self.resumed |= name not in self._whole
        self._whole.add(name)
        return load(data[DIGITS:])

    def has(self, name: str) -> bool:
        return name in self._whole or self.get(name) is not None

    def put(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        try:
            data = save({key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()})
        except SafetensorError as error:
            raise AttngapError(f"Cannot keep the piece {name!r}: {error}") from error
        packed = zlib.crc32(data).to_bytes(DIGITS, "little") + data
        # Not flushed to the disk itself: a piece that a power failure has cut short is found out and computed again.
        write_atomically(self._path(name), lambda path: path.write_bytes(packed), lasting=False)
        self._whole.add(name)

    def place(self, name: str) -> str:
        return str(self._path(name))

    def clear(self) -> None:
        """Remove the pieces, the last one last, and the folder if nothing else is in it."""
        pieces = sorted(self.folder.glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime_ns)
        ours = [*self.folder.glob(f".*{SUFFIX}.*.draft"), *pieces]
        for path in (*ours, self.folder / LOCK, self.folder / MARKER):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not empty: somebody else's files stay
            self.folder.rmdir()

    def clear_if_empty(self) -> None:
        """Remove what a run that was killed while it cleared its pieces has left."""
        if not any(self.folder.glob(f"*{SUFFIX}")):
            self.clear()

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.{self.key}{SUFFIX}"


@contextlib.contextmanager
def open_checkpoint(folder: Path | None, key: Mapping[str, Any]) -> Iterator[Checkpoint]:
    """Open a folder for the pieces of one run; they go when the run has finished, and stay when it has not.

    A run that has not made any leaves no folder.

    Without a folder they are in a temporary one and go in either case.
    """
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="attngap-") as scratch:
            yield Checkpoint(Path(scratch), key)
        return
    found = folder.parent.exists()
    claim(folder)
    with locked(folder / LOCK):
        checkpoint = Checkpoint(folder, key)
        try:
            yield checkpoint
        except BaseException:
            checkpoint.clear_if_empty()  # refused before its first piece: there is nothing to come back to
            if not found:
                with contextlib.suppress(OSError):  # not empty: the pieces are in it
                    folder.parent.rmdir()
            raise
        checkpoint.clear()


def claimed(folder: Path) -> bool:
    """Whether this is a folder of pieces that we made; an empty one is, too: a run was killed before it marked it."""
    return (folder / MARKER).is_file() or (folder.name == PIECES and folder.is_dir() and not any(folder.iterdir()))


def claim(folder: Path) -> None:
    """Make the folder and mark it as ours; one that holds anything else is refused."""
    try:
        if folder.is_dir() and any(folder.iterdir()) and not claimed(folder):
            raise AttngapError(
                f"'{folder}' is not empty and was not made by attngap, so pieces of a run cannot go there. "
                "Choose another folder"
            )
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MARKER).write_text(NOTICE, encoding="utf-8")
    except OSError as error:
        raise AttngapError(f"Cannot write to '{folder}': {error}. Choose another folder") from error
