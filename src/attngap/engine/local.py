"""Jobs on this machine, by joblib's process pool."""

import contextlib
import functools
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from attngap.engine.outcome import Outcome, attempt

WATCH_SECONDS = 0.5


def run_local(
    function: Callable[[Any], Any], jobs: Sequence[Any], *, workers: int = 1, retries: int = 2
) -> Iterator[Outcome]:
    """Yield outcomes as jobs finish. One worker runs in this process; more run in processes of their own.

    When a worker dies (killed, out of memory) joblib gives up its whole pool. The jobs that were in flight are then
    repeated one at a time, each in a pool of its own, so that the one that kills its worker is found and the others
    are not blamed for it.
    """
    if workers == 1:
        yield from (attempt(function, index, job) for index, job in enumerate(jobs))
        return
    waiting = list(range(len(jobs)))
    deaths = dict.fromkeys(waiting, 0)
    suspects: list[int] = []
    while waiting or suspects:
        batch, width = (waiting, workers) if waiting else ([suspects.pop()], 2)  # a pool of 1 would be this process
        started: set[int] = set()
        done: set[int] = set()
        for outcome in _pool(function, jobs, batch, width, started):
            done.add(outcome.index)
            yield Outcome(outcome.index, outcome.value, outcome.error, attempts=deaths[outcome.index] + 1)
        for index in sorted(started - done):
            deaths[index] += 1
            if deaths[index] > retries:
                yield Outcome(index, error=f"its worker died {deaths[index]} times", attempts=deaths[index])
            else:
                suspects.append(index)
        waiting = [index for index in waiting if index not in started]


def _pool(
    function: Callable[[Any], Any], jobs: Sequence[Any], batch: Sequence[int], width: int, started: set[int]
) -> Iterator[Outcome]:
    """Outcomes of a batch until it is through or a worker dies; `started` collects what was handed out."""
    from joblib import Parallel, delayed
    from joblib.externals.loky.process_executor import TerminatedWorkerError

    def hand_out():
        for index in batch:
            started.add(index)
            yield delayed(_attempt_in_worker)(function, index, jobs[index], os.getpid())

    # One job at a time and none in advance: what is handed out and not back is what was running.
    options: dict[str, Any] = {"return_as": "generator_unordered", "pre_dispatch": "1*n_jobs", "batch_size": 1}
    parallel = Parallel(n_jobs=width, **options)
    stream: Any = None
    try:
        with contextlib.suppress(TerminatedWorkerError):
            stream = parallel(hand_out())  # a worker may die while the first jobs are still being handed out
            for outcome in stream:  # noqa: UP028 - `yield from` would close the stream before the lines below
                yield outcome
    finally:
        if stream is not None:
            with warnings.catch_warnings():  # joblib warns that jobs were canceled: that is what closing is for
                warnings.simplefilter("ignore")
                stream.close()


def _attempt_in_worker(function: Callable[[Any], Any], index: int, job: Any, driver: int) -> Outcome:
    _end_with(driver)
    return attempt(function, index, job)


@functools.cache
def _end_with(driver: int) -> None:
    """Watch for the driver's death from a thread: a killed driver cannot stop its workers, which would work on."""

    def watch() -> None:
        while os.getppid() == driver:
            time.sleep(WATCH_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
