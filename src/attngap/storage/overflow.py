"""Tensors that a run keeps for later: in memory as far as a limit goes, then in files that are mapped into it."""

import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from attngap.errors import AttngapError

LIMIT = 2**31  # bytes kept in memory


class Overflow:
    """Keeps what it is given; beyond `limit` bytes in files, which the system reads when they are used and may drop.

    A file is gone when nobody holds its tensor any more, also where a run was killed.
    """

    def __init__(self, folder: Path | None = None, limit: int | None = None):
        self.folder, self.limit = folder, LIMIT if limit is None else limit
        self.bytes = 0  # kept so far
        self.written = 0  # of these, in files

    def keep(self, x: Tensor) -> Tensor:
        """The same numbers; a tensor of an accelerator stays where it is."""
        self.bytes += x.nbytes
        if self.bytes <= self.limit or x.device.type != "cpu" or not x.nbytes or type(x) is not Tensor:
            return x
        try:
            number, name = tempfile.mkstemp(prefix="kept-", suffix=".draft", dir=self.folder)
            try:
                with os.fdopen(number, "wb") as file:
                    file.write(x.detach().contiguous().view(torch.uint8).numpy().data)
                found = torch.from_file(name, shared=False, size=x.numel(), dtype=x.dtype)
            finally:
                os.unlink(name)  # a mapped file stays readable
        except OSError as error:
            place = tempfile.gettempdir() if self.folder is None else self.folder
            raise AttngapError(f"No room for {x.nbytes / 1e6:.0f} MB in '{place}': {error}. Free some space") from error
        self.written += x.nbytes
        return found.view(x.shape)
