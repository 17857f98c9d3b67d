"""One run at a time in one folder."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from attngap.errors import AttngapError

try:
    import fcntl
except ImportError:  # Windows has no advisory locks of this kind
    fcntl = None


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file `path`, or refuse when another run does; the system frees the lock of a killed run."""
    if fcntl is None:
        yield
        return
    while True:
        with path.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise AttngapError(
                    f"'{path.parent}' is in use by another run. Wait for it, or choose another folder"
                ) from error
            if _is(path, file.fileno()):
                yield
                return


def _is(path: Path, handle: int) -> bool:
    """Whether the open file is still the one at `path`: the run that held it may just have removed it."""
    try:
        return os.path.samestat(path.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False
