"""Carrying out specs: one here, or many through the engine into the store."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from attngap import engine
from attngap.errors import AttngapError
from attngap.models.placement import parse_device
from attngap.probes.model import Decoder
from attngap.probes.spec import Spec, build
from attngap.probes.tasks.base import Task
from attngap.probes.train import Report, Trained, train
from attngap.provenance import provenance
from attngap.storage.runs import Record, Runs, spec_key

Watch = Callable[[Spec, int, float, float | None], None]  # spec, step, loss, latest validation score


@dataclasses.dataclass(frozen=True)
class ProbeJob:
    """What is sent to a worker: plain data only."""

    spec: Spec
    checkpoints: str | None = None
    threads: int = 1
    device: str = "cpu"  # which decides no number but by rounding, so that no spec names it


def execute(job: ProbeJob, report: Report | None = None) -> dict[str, Any]:
    """Train what the spec says; returns `result` and `provenance`, ready for the store."""
    spec = job.spec
    with in_threads(job.threads), torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec["seed"])
        task, model, options = build(spec)
        model.to(device_named(job.device))  # made on the CPU, so that weights are the same everywhere
        file = Path(job.checkpoints) / f"{spec_key(spec)}.safetensors" if job.checkpoints else None
        rate, seed = spec["learning_rate"], spec["seed"]
        trained = train(model, task, options, learning_rate=rate, seed=seed, checkpoints=file, report=report)
    facts = provenance(seed=seed, threads=job.threads, device=job.device)
    return {"result": scores_and_sizes(task, model, trained), "provenance": facts}


def device_named(name: str) -> torch.device:
    return parse_device(name) or torch.device("cpu")


def check_device(name: str, ray: str | None) -> None:
    """Refuse a device that is not there, and one that workers of a cluster would not share fairly."""
    if device_named(name).type != "cpu" and ray is not None:
        raise AttngapError(f"Workers of a cluster compute on their CPUs, not on {name}. Leave out --device or --ray")


@contextlib.contextmanager
def in_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _watched(watch: Watch, job: ProbeJob) -> dict[str, Any]:
    return execute(job, functools.partial(watch, job.spec))


def scores_and_sizes(task: Task, model: Decoder, trained: Trained) -> dict[str, Any]:
    """What is stored of a run: its scores, and what they are to be measured against."""
    rank, floats = model.state_rank(task.tokens), model.state_floats(task.tokens)
    bounded = floats == model.state_floats(2 * task.tokens)  # the law is about memories of fixed size
    return {
        **dataclasses.asdict(trained),
        "metric": task.metric,
        "higher": task.higher,
        "chance": task.chance,
        "best": task.best,
        "closed": None if trained.score is None else task.closed(trained.score),
        "predicted": task.capacity(rank, model.options.value_dim) if bounded else None,
        "parameters": model.parameter_count,
        "state_floats": floats,
        "state_rank": rank,
        "tokens": task.tokens,
    }


def check(specs: Sequence[Spec]) -> None:
    """Build every distinct model once, so that sizes that do not fit are told before hours of work."""
    seen = set()
    for spec in specs:
        key = spec_key({name: spec[name] for name in ("task", "task_options", "mechanism", "model")})
        if key not in seen:
            seen.add(key)
            build(spec)


@dataclasses.dataclass(frozen=True)
class Done:
    """One finished or failed run of a batch."""

    spec: Spec
    result: dict[str, Any] | None
    error: str | None


def run_all(
    specs: Sequence[Spec],
    runs: Runs,
    *,
    sweep: str,
    workers: int = 1,
    threads: int = 1,
    device: str = "cpu",
    ray: str | None = None,
    checkpoints: Path | None = None,
    retries: int = 2,
    watch: Watch | None = None,
) -> Iterator[Done]:
    """Compute the runs the database lacks and store each as it finishes. Ends early only by Ctrl-C or close.

    `workers` runs at a time, of `threads` each, on `device`. The presets are so small that a second thread gains
    little, and another run makes better use of a core.

    `watch` is called after every step of a run in this process, that is with one worker.
    """
    check_device(device, ray)
    check(specs)
    if checkpoints is not None:
        checkpoints.mkdir(parents=True, exist_ok=True)
    runs.announce(sweep, specs)
    missing = [dict(spec) for spec in runs.missing(specs)]
    _drop_checkpoints(checkpoints, [spec for spec in specs if spec not in missing])  # a kill may have come in between
    jobs = [ProbeJob(spec, str(checkpoints) if checkpoints else None, threads, device) for spec in missing]
    function: Callable[[ProbeJob], dict[str, Any]] = execute
    if watch is not None and workers == 1 and ray is None:
        function = functools.partial(_watched, watch)
    for outcome in engine.run(function, jobs, workers=workers, ray=ray, retries=retries):
        spec = missing[outcome.index]
        if outcome.error is not None:
            runs.fail(spec, outcome.error)
            yield Done(spec, None, outcome.error)
            continue
        runs.add(spec, outcome.value["result"], outcome.value["provenance"])
        _drop_checkpoints(checkpoints, [spec])
        yield Done(spec, outcome.value["result"], None)


def _drop_checkpoints(folder: Path | None, stored: Sequence[Spec]) -> None:
    """A run that is in the database needs its checkpoint no more."""
    if folder is not None:
        for spec in stored:
            (folder / f"{spec_key(spec)}.safetensors").unlink(missing_ok=True)


def finished(specs: Sequence[Spec], runs: Runs) -> list[Record]:
    """The records of these specs, in their order; refuses when one is missing."""
    stored = {record.key: record for record in runs.records()}
    keys = [spec_key(spec) for spec in specs]
    if lost := [key for key in keys if key not in stored]:
        errors = runs.failures()
        why = errors.get(lost[0], "it was not run").strip().splitlines()[-1]
        raise AttngapError(f"{len(lost)} of {len(keys)} runs did not finish; the first: {why}")
    return [stored[key] for key in dict.fromkeys(keys)]
