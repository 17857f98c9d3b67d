"""A folder of results: ours or left alone, and changed as a whole."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from attngap.errors import AttngapError
from attngap.storage.checkpoint import PIECES, claimed
from attngap.storage.files import drop_drafts as drop_files
from attngap.storage.files import flush, is_running

DRAFT = ".new-"


def check_output(folder: Path, record: str, what: str, *, overwrite: bool) -> None:
    """Refuse a folder that holds anything but unfinished work of ours, or with `overwrite` a result of ours.

    A folder is ours when it has the file `record`, which is written last, or pieces of a run that was killed.
    """
    ours = claimed(folder / PIECES)
    if folder.exists() and not folder.is_dir():
        raise AttngapError(f"'{folder}' is a file. Choose a folder")
    if (folder / record).exists():
        if not overwrite and not ours:
            raise AttngapError(f"'{folder}' already holds a {what}. Choose another folder, or pass --overwrite")
    elif folder.is_dir() and any(folder.iterdir()) and not ours:
        raise AttngapError(f"'{folder}' is not empty and not a {what}. Choose another folder")


@contextlib.contextmanager
def publish(folder: Path, record: str) -> Iterator[Path]:
    """Yield a new folder to write into; its files then take their places in `folder` all at once, `record` last.

    The record of an older result goes first: a kill in between leaves a folder that says it is not whole, never one
    that is half of each.
    """
    draft = folder / f"{DRAFT}{os.getpid()}"
    try:
        drop_drafts(folder)
        draft.mkdir(parents=True)
        yield draft
        for path in draft.rglob("*"):
            flush(path)
        (folder / record).unlink(missing_ok=True)
        flush(folder)
        for path in sorted(draft.iterdir(), key=lambda path: (path.name == record, path.name)):
            place = folder / path.name
            if place.is_dir() and not place.is_symlink():
                shutil.rmtree(place)
            path.replace(place)
        flush(folder)
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or error
        raise AttngapError(f"Cannot write to '{folder}': {why}. Make room and run the same command again") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def drop_drafts(folder: Path) -> None:
    """Remove what processes that were killed had begun to write in the folder."""
    drop_files(folder)
    for path in folder.glob(f"{DRAFT}*"):
        if not is_running(path.name.removeprefix(DRAFT)):
            shutil.rmtree(path, ignore_errors=True)
