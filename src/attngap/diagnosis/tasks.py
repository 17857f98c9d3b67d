"""Parts of a diagnosis that do not wait for one another: done here one after the other, or as jobs on a cluster."""

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from attngap.diagnosis.run import DiagnosisRun
from attngap.engine.cluster import Cluster
from attngap.errors import AttngapError
from attngap.models.positions import layer_positions
from attngap.progress import Advance
from attngap.storage.pieces import HeldPieces

Given = dict[str, dict[str, Tensor]]

_LOOKED_AT: "weakref.WeakSet[torch.nn.Module]" = weakref.WeakSet()  # models of this worker whose positions are known


@dataclasses.dataclass(frozen=True)
class Task:
    """`function(run, *args, advance)`, which leaves pieces; on a cluster it has none but those it says it `needs`."""

    function: Callable[..., None]
    args: tuple[Any, ...]
    note: str
    steps: int = 1
    needs: tuple[str, ...] = ()  # those that are there are sent along
    fits: bool = False  # needs every layer's fit: they are sent once for all tasks


@contextlib.contextmanager
def performing(run: DiagnosisRun, advance: Advance) -> Iterator[Callable[[Task], None]]:
    """Yield what performs a task: at once, or on the run's cluster, of which all are done when the block ends."""
    if run.cluster is None:
        yield lambda task: task.function(run, *task.args, advance)
        return
    jobs = _Jobs(run, run.cluster, advance)
    yield jobs.submit
    jobs.finish()


class _Jobs:
    """Tasks on a cluster. The model and the passages go there once, as do the fits; pieces come back."""

    def __init__(self, run: DiagnosisRun, cluster: Cluster, advance: Advance):
        self.run, self.cluster, self.advance = run, cluster, advance
        self.tasks: list[Task] = []

    def submit(self, task: Task) -> None:
        while self.cluster.full():
            self._collect()
        run, pieces = self.run, self.run.checkpoint
        bare = dataclasses.replace(run, checkpoint=HeldPieces({}), quiet=True, cluster=None)
        shared = [self.cluster.share("run", lambda: bare)]
        names = [f"fit-{layer}" for layer in range(run.shape.layers)] if task.fits else []
        shared.append(self.cluster.share(f"{len(names)} fits", lambda: {name: pieces.require(name) for name in names}))
        given = {name: found for name in task.needs if (found := pieces.get(name)) is not None}
        self.cluster.submit(len(self.tasks), _perform, (task.function, task.args, given), *shared)
        self.tasks.append(task)
        self.advance(0, note=task.note)

    def finish(self) -> None:
        while self.cluster.running:
            self._collect()

    def _collect(self) -> None:
        outcome = self.cluster.next()
        task = self.tasks[outcome.index]
        if outcome.error is not None:
            raise AttngapError(f"{task.note} could not be done on the cluster: {outcome.error}")
        for name, piece in outcome.value.items():
            self.run.checkpoint.put(name, piece)
        self.advance(task.steps, note=task.note)


def _perform(
    run: DiagnosisRun, fits: Given, job: tuple[Callable[..., None], tuple[Any, ...], Given]
) -> dict[str, dict[str, Tensor]]:
    """On a worker: the pieces that a task leaves."""
    function, args, given = job
    torch.set_num_threads(1)
    if run.model not in _LOOKED_AT:
        layer_positions(run.model)  # noted for the fits, as where the run began
        _LOOKED_AT.add(run.model)
    pieces = HeldPieces(fits | given)
    function(dataclasses.replace(run, checkpoint=pieces), *args, lambda steps=1, note="": None)
    return pieces.made


def check_sendable(device: torch.device, *, on_disk: bool) -> None:
    """Refuse a model that workers could not compute with as this machine does."""
    if on_disk:
        raise AttngapError("A cluster is sent all weights, and --max-memory leaves some on disk. Leave out one of them")
    if device.type != "cpu":
        raise AttngapError(
            f"Workers of a cluster compute on their CPUs, and the model would be on {device}. Leave out --device or "
            "--ray"
        )
