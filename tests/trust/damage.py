"""Read a file in many damaged versions: each is read or refused in one line, within seconds and a bounded memory.

A file that is hashed must not be read as something else either: where a damaged one is accepted, the model computes
what it computed before.
"""

import contextlib
import dataclasses
import random
import resource
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from attngap.errors import AttngapError
from tests.trust.mutations import mutate
from tests.trust.outcome import Outcome

SECONDS = 20  # of the processor, for one file; none takes one
BUSY = 15  # times as long by the clock: others use the machine, too
MEMORY = 2_000_000_000  # bytes that reading damaged files may add to a process


@dataclasses.dataclass
class Kind:
    """A file, what reads it, and what must come out if it is read at all (None: anything)."""

    path: Path
    read: Callable[[], Any]
    expected: Any = None
    head: int | None = None  # only so many bytes are damaged: behind them any bytes are right


def damaged(name: str, kind: Kind, number: int, seed: int) -> Outcome:
    outcome, draw = Outcome(), random.Random(f"{name} {seed}")
    whole = kind.path.read_bytes()
    kind.read()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # A damaged name may be one that a hub is asked for: nobody is asked here.
    with warnings.catch_warnings(), mock.patch("huggingface_hub.constants.HF_HUB_OFFLINE", True):
        warnings.simplefilter("ignore")
        for i in range(number):
            kind.path.write_bytes(mutate(whole[: kind.head], draw) + (whole[kind.head :] if kind.head else b""))
            fault = _fault(kind)
            outcome.count(name)
            if fault:
                outcome.faults.append(f"{name}, file {i} of seed {seed}: {fault}")
    kind.path.write_bytes(whole)
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    if grown > MEMORY:
        outcome.faults.append(f"{name}, seed {seed}: memory grew by {grown / 1e9:.1f} GB")
    return outcome


def _fault(kind: Kind) -> str | None:
    try:
        with in_time(SECONDS):
            found = kind.read()
    except AttngapError as error:
        said = str(error)
        return f"more than a line: {said!r}" if "\n" in said.strip() or not said else None
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return f"{type(error).__name__}: {str(error)[:200]}"
    if kind.expected is not None and not torch.equal(found, kind.expected):
        return "read as something else"
    return None


class TooLongError(BaseException):
    """Nobody catches it by chance: TimeoutError would pass for an error of the disk."""


@contextlib.contextmanager
def in_time(seconds: float) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TooLongError(f"not read after {seconds} s")

    before = [signal.signal(number, stop) for number in (signal.SIGALRM, signal.SIGPROF)]
    signal.setitimer(signal.ITIMER_REAL, BUSY * seconds)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGALRM, before[0])
        signal.signal(signal.SIGPROF, before[1])
