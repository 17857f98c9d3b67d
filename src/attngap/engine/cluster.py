"""The same jobs on a Ray cluster."""

import contextlib
import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from attngap.engine.outcome import Outcome, attempt
from attngap.errors import AttngapError, missing_extra

ANSWER_SECONDS = 5.0
LOOK_SECONDS = 5.0  # between looks at the nodes while nothing comes back
LOST_SECONDS = 60.0  # without workers until a run gives up: a cluster may be starting others
AHEAD = 2  # jobs handed out for each CPU, so that none idles while the driver stores a result


def run_cluster(
    function: Callable[[Any], Any], jobs: Sequence[Any], *, address: str, retries: int = 2
) -> Iterator[Outcome]:
    """Yield outcomes as jobs finish on the cluster at `address` ("host:port", "ray://host:port", "auto", or "local").

    Ray repeats a job whose worker or node died, up to `retries` times; a cluster without any worker left is an error
    after a while. attngap must be installed on every node.
    """
    ray = _connect(address)
    try:
        remote = ray.remote(num_cpus=1, max_retries=retries)(attempt)
        waiting = list(enumerate(jobs))[::-1]
        running: dict[Any, int] = {}
        idle = 0.0  # seconds without a node that takes jobs
        while waiting or running:
            room = AHEAD * max(1, int(ray.cluster_resources().get("CPU", 1)))
            while waiting and len(running) < room:
                index, job = waiting.pop()
                running[remote.remote(function, index, job)] = index
            ready, _ = ray.wait(list(running), num_returns=1, timeout=LOOK_SECONDS)
            idle = 0.0 if ready or _has_workers(ray) else idle + LOOK_SECONDS
            if idle >= LOST_SECONDS:
                raise AttngapError(
                    f"The Ray cluster at {address!r} has lost all its workers; {len(running) + len(waiting)} jobs are "
                    "not done. What is done is kept: start workers (ray start --address) and run the same command again"
                )
            for reference in ready:
                index = running.pop(reference)
                yield _collect(ray, reference, index, retries)
    finally:
        ray.shutdown()


def _has_workers(ray: Any) -> bool:
    """Whether any node is left that takes jobs; without one Ray would wait for ever."""
    return any(node["Alive"] and node["Resources"].get("CPU") for node in ray.nodes())


def _collect(ray: Any, reference: Any, index: int, retries: int) -> Outcome:
    try:
        return ray.get(reference)
    except ray.exceptions.RayError as error:
        first = str(error).strip().splitlines()[0]
        return Outcome(index, error=f"its worker died: {first}", attempts=retries + 1)


def _connect(address: str) -> Any:
    try:
        import ray
    except ImportError:
        raise missing_extra("A Ray address needs", "ray") from None
    if address not in ("auto", "local"):
        _knock(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise AttngapError(f"No Ray cluster at {address!r}: {first} Start one: ray start --head") from error
    return ray


def _knock(address: str) -> None:
    """Ray itself waits minutes for an address that does not answer."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise AttngapError(f"Ray address {address!r} is not host:port, ray://host:port, auto or local")
    try:
        with contextlib.closing(socket.create_connection((host, int(port)), timeout=ANSWER_SECONDS)):
            return
    except (OSError, OverflowError) as error:
        raise AttngapError(f"No Ray cluster answers at {address!r} ({error}). Start one: ray start --head") from error
