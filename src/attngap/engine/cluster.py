"""The same jobs on a Ray cluster."""

import contextlib
import functools
import importlib.util
import logging
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from attngap.engine.outcome import Outcome, attempt
from attngap.engine.parcel import Parcel, pack, unpack, unpack_once
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
    with Cluster(address, retries=retries) as cluster:
        for index, job in enumerate(jobs):
            while cluster.full():
                yield cluster.next(also=len(jobs) - index)
            cluster.submit(index, function, job)
        while cluster.running:
            yield cluster.next()


class Cluster:
    """A connection to a Ray cluster that jobs are handed to one at a time; it ends with the `with` block."""

    def __init__(self, address: str, *, retries: int = 2):
        self.address, self.retries = address, retries
        self.running: dict[Any, int] = {}  # the number of each job that is out
        self._shared: dict[str, Any] = {}
        self._ray = _connect(address)
        self._perform = self._ray.remote(num_cpus=1, max_retries=retries)(_perform)

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *error: Any) -> None:
        self._ray.shutdown()

    def share(self, name: str, make: Callable[[], Any]) -> Any:
        """Send what many jobs need, once for each name; what is returned stands for it in `submit`.

        On each machine all workers read the same copy, which they must not write to.
        """
        if name not in self._shared:
            self._shared[name] = self._ray.put(pack(make()))
        return self._shared[name]

    def submit(self, index: int, function: Callable[..., Any], job: Any, *shared: Any) -> None:
        """Hand out `function(*shared, job)`."""
        self.running[self._perform.remote(function, index, pack(job), *shared)] = index

    def full(self) -> bool:
        """Whether every CPU has enough to do: more jobs would only take memory."""
        return len(self.running) >= AHEAD * max(1, int(self._ray.cluster_resources().get("CPU", 1)))

    def next(self, also: int = 0) -> Outcome:
        """Wait for the next outcome; `also` counts the jobs that were not handed out yet, for what an error says."""
        idle = 0.0  # seconds without a node that takes jobs
        while True:
            ready, _ = self._ray.wait(list(self.running), num_returns=1, timeout=LOOK_SECONDS)
            if ready:
                return self._collect(ready[0])
            idle = 0.0 if _has_workers(self._ray) else idle + LOOK_SECONDS
            if idle >= LOST_SECONDS:
                raise AttngapError(
                    f"The Ray cluster at {self.address!r} has lost all its workers; {len(self.running) + also} jobs "
                    "are not done. What is done is kept: start workers (ray start --address) and run the same command "
                    "again"
                )

    def _collect(self, reference: Any) -> Outcome:
        index = self.running.pop(reference)
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            first = str(error).strip().splitlines()[0]
            return Outcome(index, error=f"its worker died: {first}", attempts=self.retries + 1)


def _perform(function: Callable[..., Any], index: int, job: Parcel, *shared: Parcel) -> Outcome:
    """On a worker."""
    return attempt(functools.partial(function, *map(unpack_once, shared)), index, unpack(job))


def _has_workers(ray: Any) -> bool:
    """Whether any node is left that takes jobs; without one Ray would wait for ever."""
    return any(node["Alive"] and node["Resources"].get("CPU") for node in ray.nodes())


def check_address(address: str) -> None:
    """Refuse an address that is none or does not answer, before anything is loaded."""
    if "ray" not in sys.modules and importlib.util.find_spec("ray") is None:
        raise missing_extra("A Ray address needs", "ray")
    if address == "auto":  # where that is, only Ray knows
        _connect(address).shutdown()
    elif address != "local":
        _knock(address)


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
