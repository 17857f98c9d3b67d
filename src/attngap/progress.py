"""Progress: a live bar in a terminal or a notebook, a line for each stage elsewhere, nothing when asked to be quiet."""

import contextlib
import html
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

Advance = Callable[..., None]
REFRESH = 0.2  # seconds between updates of a notebook's bar


@contextlib.contextmanager
def progress(description: str, total: int, *, quiet: bool | None = False) -> Iterator[Advance]:
    """Yield `advance(steps=1, note="")`; the note says what is being done right now. On stderr, or in the notebook.

    `quiet=None` is the default of library calls: a notebook shows a bar, a script shows nothing.

    >>> with progress("floors", total=3, quiet=True) as advance:
    ...     advance(note="layer 0")
    """
    notebook = _notebook()
    if quiet or (quiet is None and notebook is None):
        yield lambda steps=1, note="": None
        return
    if notebook is not None:
        with _in_notebook(notebook, description, total) as advance:
            yield advance
        return
    console = Console(stderr=True, markup=False)  # names are shown as they are
    if not console.is_terminal:
        start = time.monotonic()
        console.print(f"{description} ...", highlight=False)
        yield lambda steps=1, note="": None
        console.print(f"{description}: done in {time.monotonic() - start:.1f} s", highlight=False)
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}", style="dim", markup=False),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(description, total=total, note="")
        yield lambda steps=1, note="": bar.update(task, advance=steps, note=note)


def _notebook() -> Any:
    """IPython's `display` inside a notebook, else None. IPython is never imported: a notebook has done so already."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None or "IPKernelApp" not in shell.config:
        return None
    return sys.modules["IPython.display"].display


@contextlib.contextmanager
def _in_notebook(display: Any, description: str, total: int) -> Iterator[Advance]:
    """One line of HTML that is redrawn in place; what remains says how long it took."""
    start = time.monotonic()
    done, drawn = 0, start

    def draw(text: str) -> dict[str, str]:
        bar = f'<progress value="{done}" max="{max(total, 1)}"></progress>'
        label = f'<span style="display: inline-block; min-width: 16em">{html.escape(description)}</span>'
        return {"text/plain": f"{description}: {text}", "text/html": f"{label} {bar} {text}"}

    handle = display(draw(f"0/{total}"), raw=True, display_id=True)

    def advance(steps: int = 1, note: str = "") -> None:
        nonlocal done, drawn
        done += steps
        if time.monotonic() - drawn >= REFRESH:
            drawn = time.monotonic()
            handle.update(draw(f"{done}/{total} {html.escape(note)}"), raw=True)

    yield advance
    done = max(total, 1)  # a stage that counts no steps is done all the same
    handle.update(draw(f"done in {time.monotonic() - start:.1f} s"), raw=True)
