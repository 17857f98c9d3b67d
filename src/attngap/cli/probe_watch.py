"""`attngap probe results --watch`: follow sweeps that run in other processes."""

import time
from typing import Any

from attngap.errors import AttngapError, unknown

EVERY_SECONDS = 1.0


def follow(runs: Any, sweep: str | None, every: float = EVERY_SECONDS) -> None:
    """One line a sweep, refreshed until nothing is left to do; elsewhere than in a terminal a line for every change."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(stderr=True, markup=False)
    if not (found := runs.progress()):
        raise AttngapError(f"{runs.path} holds no sweep to watch. Start one: attngap probe sweep FILE")
    if sweep is not None and sweep not in {each.sweep for each in found}:
        raise unknown("sweep", sweep, [each.sweep for each in found])
    last = None
    with Live(console=console, auto_refresh=False) as live:
        while True:
            shown = [each for each in runs.progress() if sweep in (None, each.sweep)]
            if shown != last:
                last = shown
                text = Text("\n".join(_line(each) for each in shown))  # its brackets are no markup
                live.update(text, refresh=True) if console.is_terminal else console.print(text)
            if not any(each.left for each in shown):
                return
            time.sleep(every)


def _line(progress: Any) -> str:
    share = progress.done / progress.total
    bar = "#" * round(20 * share)
    failed = f", {progress.failed} failed" if progress.failed else ""
    return f"{progress.sweep}  [{bar:<20}]  {progress.done}/{progress.total}{failed}  last {progress.last or '-'}"
