"""Finished pieces of a conversion on disk, from which a killed run goes on; or nothing, when no folder was given."""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from attngap.errors import AttngapError


class Work:
    """Each piece is a file written whole or not at all; a piece made with other options never matches."""

    def __init__(self, folder: Path | None, key: dict[str, Any]):
        self.folder = folder
        self.resumed = False  # has a piece of an earlier run been used
        self.key = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]

    def piece(self, name: str) -> dict[str, Tensor] | None:
        path = self._path(name)
        if path is None or not path.exists():
            return None
        self.resumed = True
        return load_file(path)

    def keep(self, name: str, tensors: dict[str, Tensor]) -> None:
        path = self._path(name)
        if path is None:
            return
        draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file({key: tensor.detach().contiguous() for key, tensor in tensors.items()}, draft)
            os.replace(draft, path)
        except OSError as error:
            draft.unlink(missing_ok=True)
            raise AttngapError(f"Cannot write '{path}': {error}. Make room and run the same command again") from error

    def clear(self) -> None:
        """The run has finished: its pieces are no longer needed."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, name: str) -> Path | None:
        return None if self.folder is None else self.folder / f"{name}.{self.key}.safetensors"
