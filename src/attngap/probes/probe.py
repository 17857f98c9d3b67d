"""`attngap.probe`: where one mechanism, or one model, stands on one task."""

import dataclasses
import itertools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from attngap.charts.inline import Grid, number
from attngap.errors import AttngapError
from attngap.mechanisms.base import Mechanism
from attngap.probes.model import Decoder, ModelOptions, replicate
from attngap.probes.presets import preset
from attngap.probes.runs import device_named, finished, in_threads, run_all, scores_and_sizes
from attngap.probes.spec import make_spec
from attngap.probes.summary import Summary, summarize
from attngap.probes.tasks.base import Task
from attngap.probes.tasks.catalogue import task as make_task
from attngap.probes.train import TrainOptions, train
from attngap.probes.zero_shot import zero_shot
from attngap.provenance import provenance
from attngap.storage.runs import Record, Runs, spec_key


@dataclasses.dataclass(frozen=True)
class Result:
    """The answer of `probe`. `score` is a mean over seeds; `summary` has the rest, None for a zero-shot model."""

    task: str
    mechanism: str
    metric: str
    score: float | None
    half_width: float | None  # of the 95% confidence interval over seeds
    chance: float
    best: float | None
    closed: float | None  # how far from chance (0) to best (1)
    summary: Summary | None
    records: list[Record]

    def __repr__(self) -> str:
        """A line for people; `summary` and `records` have everything."""
        return f"Result({', '.join(f'{name}={cell}' for name, cell in self._shown().items())})"

    def _repr_html_(self) -> str:
        shown = self._shown()
        return Grid("A probe, mean over seeds", tuple(shown), [tuple(shown.values())]).html()

    def _shown(self) -> dict[str, str]:
        interval = "" if self.half_width is None else f" ± {self.half_width:.3f}"
        score = number(self.score, ".3f") + interval
        ends = {"chance": number(self.chance, ".3f"), "best": number(self.best, ".3f")}
        seeds = {} if self.summary is None else {"seeds": str(len(self.summary.scores))}
        return {"task": self.task, "mechanism": self.mechanism, self.metric: score, **ends, **seeds}


def probe(
    task: str | Task,
    mechanism: Any,
    *,
    seeds: int | Sequence[int] = 1,
    learning_rates: Sequence[float] | None = None,
    task_options: Mapping[str, Any] | None = None,
    model: Mapping[str, Any] | None = None,
    train: Mapping[str, Any] | None = None,
    state: int | None = None,
    tokenizer: Any = None,
    sequences: int = 64,
    db: str | Path | None = None,
    workers: int = 1,
    threads: int = 1,
    device: str | torch.device = "cpu",
    ray: str | None = None,
) -> Result:
    """Train small models with `mechanism` on `task`, or put the task to a Hugging Face model as it is.

    `mechanism` is a name of the catalogue (`"gla"`, `"polynomial:degree=3"`, `"gla+softmax"` for one a layer), a
    `Mechanism` (copied for every layer), a function of (heads, dim, value_dim) that makes one, or a Hugging Face causal
    model, for which `tokenizer` and `sequences` count and nothing is trained. Sizes are the task's CPU preset, changed
    by `task_options`, `model` and `train`. With `db` finished runs are stored and found again. `workers` runs go side
    by side, of `threads` each; only wide models gain from more than one. `device` is where they are trained; a Hugging
    Face model is asked where it is.

    >>> quick = {"steps": 2, "batch": 4, "test": 8, "validation": 8}
    >>> probe("copy", "elu", train=quick).metric
    'accuracy'
    """
    name, task_options = (task.name, task.options) if isinstance(task, Task) else (task, task_options)
    if hasattr(mechanism, "get_input_embeddings"):
        chosen = make_task(name, **(task_options or {}))
        return _zero_shot(chosen, mechanism, tokenizer, sequences)
    seeds = range(seeds) if isinstance(seeds, int) else seeds
    rates = preset(name).learning_rates if learning_rates is None else learning_rates
    specs = [
        make_spec(
            name,
            mechanism if isinstance(mechanism, str) else "softmax",  # sizes do not depend on the mechanism
            seed=seed,
            learning_rate=rate,
            task_options=task_options,
            model=model,
            train=train,
            state=state if isinstance(mechanism, str) else None,
        )
        for seed, rate in itertools.product(seeds, rates)
    ]
    if not specs:
        raise AttngapError("probe needs at least one seed and one learning rate")
    if isinstance(mechanism, str):
        return _result(_stored(specs, db, workers=workers, threads=threads, device=str(device), ray=ray))
    if db is not None or ray is not None or state is not None:
        raise AttngapError(
            "db, ray and state need a mechanism by name; register yours in the entry-point group attngap.mechanisms"
        )
    return _result([_train_object(spec, mechanism, threads, str(device)) for spec in specs])


def _stored(specs: list[dict[str, Any]], db: str | Path | None, **where: Any) -> list[Record]:
    with tempfile.TemporaryDirectory() as folder, Runs(db or Path(folder) / "runs.db") as runs:
        for _ in run_all(specs, runs, sweep=f"probe {specs[0]['task']}", **where):
            pass
        return finished(specs, runs)


def _train_object(spec: dict[str, Any], mechanism: Any, threads: int, device: str) -> Record:
    """The same run with somebody's own object: its numbers cannot be named by a hash, so they are not stored."""
    task = make_task(spec["task"], **spec["task_options"])
    options = TrainOptions(**spec["train"])
    make = replicate(mechanism) if isinstance(mechanism, Mechanism) else _factory(mechanism)
    with in_threads(threads), torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec["seed"])
        decoder = Decoder(task, [make], ModelOptions(**spec["model"])).to(device_named(device))
        trained = train(decoder, task, options, learning_rate=spec["learning_rate"], seed=spec["seed"])
    spec = {**spec, "mechanism": decoder.mixers[0].mechanism.name}
    facts = provenance(seed=spec["seed"], threads=threads, device=device)
    return Record(spec_key(spec), spec, scores_and_sizes(task, decoder, trained), facts, finished="")


def _factory(function: Any) -> Callable[[ModelOptions], Mechanism]:
    if not callable(function):
        raise AttngapError(
            "mechanism must be a name, a Mechanism, a function that makes one, or a Hugging Face model; "
            f"got {function!r}"
        )

    def make(sizes: ModelOptions) -> Mechanism:
        made = function(sizes.heads, sizes.key_dim, sizes.value_dim)
        if not isinstance(made, Mechanism):
            raise AttngapError(f"the function given as mechanism must make a Mechanism, it made {made!r}")
        return made

    return make


def _result(records: list[Record]) -> Result:
    (summary,) = summarize(records)
    return Result(
        task=summary.task,
        mechanism=summary.mechanism,
        metric=summary.metric,
        score=summary.mean,
        half_width=summary.half_width,
        chance=summary.chance,
        best=summary.best,
        closed=summary.closed,
        summary=summary,
        records=records,
    )


def _zero_shot(task: Task, model: Any, tokenizer: Any, sequences: int) -> Result:
    found = zero_shot(model, task, tokenizer=tokenizer, sequences=sequences)
    return Result(
        task=task.name,
        mechanism=getattr(model.config, "name_or_path", "") or type(model).__name__,
        metric=task.metric,
        score=found.score,
        half_width=None,
        chance=1 / task.outputs,
        best=task.best,
        closed=None,
        summary=None,
        records=[],
    )
