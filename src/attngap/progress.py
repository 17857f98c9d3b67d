"""Progress on stderr: a live bar in a terminal, one line a stage elsewhere, nothing when asked to be quiet."""

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

Advance = Callable[..., None]


@contextlib.contextmanager
def progress(description: str, total: int, *, quiet: bool = False) -> Iterator[Advance]:
    """Yield `advance(steps=1, note="")`; the note says what is being done right now.

    >>> with progress("floors", total=3, quiet=True) as advance:
    ...     advance(note="layer 0")
    """
    if quiet:
        yield lambda steps=1, note="": None
        return
    console = Console(stderr=True)
    if not console.is_terminal:
        start = time.monotonic()
        console.print(f"{description} ...", highlight=False)
        yield lambda steps=1, note="": None
        console.print(f"{description}: done in {time.monotonic() - start:.1f} s", highlight=False)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("[dim]{task.fields[note]}"),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(description, total=total, note="")
        yield lambda steps=1, note="": bar.update(task, advance=steps, note=note)
