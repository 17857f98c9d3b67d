"""One call for a laptop and for a cluster."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from attngap.engine.outcome import Outcome
from attngap.errors import AttngapError


def run(
    function: Callable[[Any], Any],
    jobs: Sequence[Any],
    *,
    workers: int = 1,
    ray: str | None = None,
    retries: int = 2,
) -> Iterator[Outcome]:
    """Yield the outcome of `function(job)` for every job, as they finish, in no fixed order.

    A job that raises yields its error; a job whose worker dies is repeated up to `retries` times. Closing the iterator,
    or Ctrl-C, stops the workers.

    >>> sorted(outcome.value for outcome in run(abs, [-1, 2, -3]))
    [1, 2, 3]
    """
    if workers < 1:
        raise AttngapError(f"workers must be at least 1, got {workers}")
    if retries < 0:
        raise AttngapError(f"retries must be at least 0, got {retries}")
    if ray is not None:
        from attngap.engine.cluster import run_cluster

        return run_cluster(function, jobs, address=ray, retries=retries)
    from attngap.engine.local import run_local

    return run_local(function, jobs, workers=workers, retries=retries)
