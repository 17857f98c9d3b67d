"""Jobs the engine tests send to other processes, which must be able to import them."""

import os
import signal
import time
from pathlib import Path


def square(x: int) -> int:
    if x < 0:
        raise ValueError(f"negative: {x}")
    return x * x


def die_once(job: tuple[str, int]) -> int:
    """Kills its own process the first time it is called with a given number."""
    folder, x = job
    mark = Path(folder) / f"died-{x}"
    if x % 3 == 0 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return x


def die_always(x: int) -> int:
    if x == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return x


def wait_for_go(job: tuple[str, int]) -> int:
    """Job 0 ends at once, every other when there is a file `go` in the folder."""
    folder, x = job
    while x and not (Path(folder) / "go").exists():
        time.sleep(0.01)
    return x


def slow(job: tuple[str, int, float]) -> int:
    """Notes its process and that it began, then takes its time."""
    folder, x, seconds = job
    (Path(folder) / f"began-{x}-{os.getpid()}").touch()
    time.sleep(seconds)
    return x
