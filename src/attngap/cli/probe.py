"""`attngap probe`: train small models where mechanisms differ, alone or in sweeps, and read the results."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from attngap.cli import complete
from attngap.cli.placement import DEVICE, Device

probe = typer.Typer(no_args_is_help=True, help="Where does a mechanism fall short, on small models?")

Db = Annotated[Path, typer.Option(help="Run database (SQLite).", envvar="ATTNGAP_DB")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]
Workers = Annotated[int, typer.Option(help="Runs at a time on this machine.")]
Threads = Annotated[int, typer.Option(min=1, help="Of each run; more than one pays for wide models only.")]
Ray = Annotated[str | None, typer.Option(help="Run on a Ray cluster: host:port, ray://host:port, auto or local.")]
Checkpoints = Annotated[Path | None, typer.Option(help="Folder for checkpoints: interrupted runs go on from there.")]
DB = Path("attngap-runs.db")


@probe.command("list", short_help="The tasks, their chance level and best score.")
def list_tasks(as_json: AsJson = False) -> None:
    """List the tasks with their chance level and best possible score at the CPU preset.

    \b
    Example:
      attngap probe list
    """
    from attngap.probes.presets import PRESETS
    from attngap.probes.tasks.catalogue import TASKS

    records = []
    for cls in TASKS:
        preset = PRESETS[cls.name]
        task = cls(**preset.task)
        records.append(
            {
                "task": cls.name,
                "paper": cls.paper,
                "about": cls.about,
                "metric": cls.metric,
                "chance": task.chance,
                "best": task.best,
                "tokens": task.tokens,
                "options": task.options,
                "model": preset.model,
                "train": preset.train,
                "learning_rates": preset.learning_rates,
                "published": preset.published,
            }
        )
    if as_json:
        print(json.dumps(records, indent=2))
        return
    _table(
        ("task", "arXiv", "asks", "chance", "best"),
        [(r["task"], r["paper"], r["about"], _number(r["chance"]), _number(r["best"])) for r in records],
        wide=2,
    )


@probe.command(short_help="Train small models on a task, compare mechanisms.")
def run(
    task: Annotated[str, typer.Argument(help="A task of `attngap probe list`.", autocompletion=complete.tasks)],
    mechanism: Annotated[
        str,
        typer.Option(
            "--mechanism",
            "-m",
            help="Names, comma between them; gla+softmax is one a layer.",
            autocompletion=complete.mechanisms,
        ),
    ] = "softmax,elu",
    seeds: Annotated[int, typer.Option(help="Runs with different weights and data.")] = 1,
    learning_rates: Annotated[str | None, typer.Option(help="Comma between them; the preset's when left out.")] = None,
    state: Annotated[
        int | None, typer.Option(help="Match states: choose head_dim so that each has about so many floats.")
    ] = None,
    options: Annotated[
        list[str] | None, typer.Option("--set", help="task.pairs=8, model.width=64, train.steps=500; repeatable.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Ask this Hugging Face model instead of training: folder, id, GGUF or alias.")
    ] = None,
    db: Db = DB,
    workers: Workers = 1,
    threads: Threads = 1,
    device: Device = DEVICE,
    ray: Ray = None,
    checkpoints: Checkpoints = None,
    as_json: AsJson = False,
) -> None:
    """Train small models on a task and compare mechanisms: mean and 95% confidence interval over seeds.

    Mechanisms are matched by width, or by state with --state. Every run is stored; what is there is not run again.

    \b
    Examples:
      attngap probe run mqar -m softmax,elu,gated-delta --seeds 3
      attngap probe run mqar --model smollm2
    """
    changes = _settings(options or [])
    if model is not None:
        _ask_model(task, model, changes.get("task"), device, as_json)
        return
    grid: dict[str, Any] = {"tasks": [task], "mechanisms": [m.strip() for m in mechanism.split(",")], "seeds": seeds}
    if learning_rates is not None:
        grid["learning_rates"] = [_rate(rate) for rate in learning_rates.split(",")]
    if state is not None:
        grid["state"] = state
    from attngap.probes.sweep import expand

    where = {"workers": workers, "threads": threads, "device": device, "ray": ray, "checkpoints": checkpoints}
    _run_and_show(f"run {task}", expand({**grid, **changes}), db, where, as_json)


@probe.command(short_help="Run what a sweep file asks for; stop and go on at will.")
def sweep(
    file: Annotated[Path, typer.Argument(help="A sweep file (TOML).")],
    db: Db = DB,
    workers: Workers = 1,
    threads: Threads = 1,
    device: Device = DEVICE,
    ray: Ray = None,
    checkpoints: Checkpoints = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Count the runs and stop.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run every combination of a sweep file that the database lacks; stop and start it at will.

    \b
    Examples:
      attngap probe sweep recall.toml --workers 2
      attngap probe sweep recall.toml --ray auto

    \b
    A sweep file:
      name = "recall"
      [[grid]]
      tasks = ["mqar"]
      mechanisms = ["softmax", "elu", "polynomial:degree=3"]
      seeds = 3
      learning_rates = [1e-3, 4e-3]
      [grid.task]
      pairs = [4, 8, 16]
      [grid.train]
      steps = 500
    """
    from attngap.probes.runs import check
    from attngap.probes.sweep import load_sweep

    name, specs = load_sweep(file)
    if dry_run:
        check(specs)
        left = _missing(db, specs)
        print(
            json.dumps({"sweep": name, "runs": len(specs), "missing": left})
            if as_json
            else f"{name}: {left} of {len(specs)} runs to do"
        )
        return
    where = {"workers": workers, "threads": threads, "device": device, "ray": ray, "checkpoints": checkpoints}
    _run_and_show(name, specs, db, where, as_json)


@probe.command(short_help="Read the database: filter, pivot, export, watch.")
def results(
    db: Db = DB,
    task: Annotated[str | None, typer.Option(help="Only this task.")] = None,
    mechanism: Annotated[str | None, typer.Option("--mechanism", "-m", help="Only this mechanism.")] = None,
    sweep: Annotated[str | None, typer.Option(help="Only runs of this sweep.")] = None,
    pivot: Annotated[bool, typer.Option("--pivot", help="One row a mechanism, one column a task.")] = False,
    csv: Annotated[Path | None, typer.Option(help="Write every run to a CSV file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw one task's scores against the state (SVG).")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Follow running sweeps until they are through.")] = False,
    as_json: AsJson = False,
) -> None:
    """Read the database: filter, pivot, export, or watch a sweep that is running elsewhere.

    \b
    Examples:
      attngap probe results --task mqar
      attngap probe results --watch
      attngap probe results --csv runs.csv
    """
    from attngap.probes.summary import summarize
    from attngap.storage.runs import Runs

    with Runs(db, readonly=True) as runs:
        if watch:
            from attngap.cli.probe_watch import follow

            follow(runs, sweep)
            return
        records = runs.records(task=task, mechanism=mechanism, sweep=sweep)
    if csv is not None:
        from attngap.probes.export import write_csv

        write_csv(records, csv)
        print(f"{len(records)} runs in {csv}", file=sys.stderr)
    summaries = summarize(records)
    if plot is not None:
        from attngap.cli.probe_plot import plot as draw

        draw(summaries, plot)
    if as_json:
        _print_json(summaries)
    elif pivot:
        _print_pivot(summaries)
    elif csv is None and plot is None:
        _print_summaries(summaries)


def _run_and_show(name: str, specs: list[Any], db: Path, where: dict[str, Any], as_json: bool) -> None:
    from attngap.probes.runs import check, check_device, run_all
    from attngap.probes.summary import summarize
    from attngap.progress import progress
    from attngap.storage.runs import Runs

    check_device(where["device"], where["ray"])
    check(specs)
    failed = []
    with Runs(db) as runs:
        missing = len(runs.missing(specs))
        if missing < len(specs):
            print(f"{len(specs) - missing} of {len(specs)} runs are in {db} already", file=sys.stderr)
        with progress(name, total=missing) as advance:

            def watch(spec: Any, step: int, loss: float, score: float | None) -> None:
                steps = spec["train"]["steps"]
                advance(0, note=f"{_label(spec)}: step {step}/{steps} loss {loss:.3f} score {_number(score)}")

            for done in run_all(specs, runs, sweep=name, watch=watch, **where):
                score = "failed" if done.result is None else _number(done.result["score"])
                advance(note=f"{_label(done.spec)}: score {score}")
                if done.error is not None:
                    failed.append(done)
        summaries = summarize(runs.records(sweep=name))
    _print_json(summaries) if as_json else _print_summaries(summaries)
    for done in failed:
        last = (done.error or "").strip().splitlines()[-1]
        print(f"{_label(done.spec)} failed: {last}", file=sys.stderr)
    if failed:
        raise typer.Exit(1)


def _label(spec: dict[str, Any]) -> str:
    return f"{spec['task']} {spec['mechanism']} seed {spec['seed']}"


def _missing(db: Path, specs: list[Any]) -> int:
    from attngap.storage.runs import Runs

    if not db.exists():
        return len(specs)
    with Runs(db, readonly=True) as runs:
        return len(runs.missing(specs))


def _ask_model(task: str, model: str, task_options: dict[str, Any] | None, device: str, as_json: bool) -> None:
    from attngap.models.load import load
    from attngap.probes.tasks.catalogue import task as make_task
    from attngap.probes.zero_shot import zero_shot

    chosen = make_task(task, **(task_options or {}))
    network, tokenizer = load(model, device=device)
    found = zero_shot(network, chosen, tokenizer=tokenizer)
    record = {
        "task": task,
        "model": model,
        "score": found.score,
        "open": found.open,
        "chance": 1 / chosen.outputs,
        "sequences": found.sequences,
        "tokens": found.tokens,
        "options": chosen.options,
    }
    if as_json:
        print(json.dumps(record, indent=2))
        return
    _table(
        ("task", "model", "among the task's tokens", "among all tokens", "chance"),
        [(task, model, *(_number(record[key]) for key in ("score", "open", "chance")))],
        wide=1,
    )


def _settings(settings: list[str]) -> dict[str, dict[str, Any]]:
    """`task.pairs=8` -> {"task": {"pairs": 8}}."""
    from attngap.errors import AttngapError, unknown
    from attngap.probes.mixers import read_value

    changes: dict[str, dict[str, Any]] = {}
    for setting in settings:
        place, equals, value = setting.partition("=")
        table, dot, key = place.partition(".")
        if not equals or not dot:
            raise AttngapError(f"--set {setting!r} is not table.key=value. Example: --set task.pairs=8")
        if table not in ("task", "model", "train"):
            raise unknown("table of --set", table, ("task", "model", "train"))
        changes.setdefault(table, {})[key] = read_value(value)
    return changes


def _rate(text: str) -> float:
    from attngap.errors import AttngapError

    try:
        return float(text)
    except ValueError as error:
        raise AttngapError(f"--learning-rates takes numbers with commas between them, got {text!r}") from error


def _print_json(summaries: list[Any]) -> None:
    import dataclasses

    print(json.dumps([dataclasses.asdict(summary) for summary in summaries], indent=2))


def _print_summaries(summaries: list[Any]) -> None:
    rows = []
    for s in summaries:
        interval = "" if s.half_width is None else f" ± {s.half_width:.3f}"
        rows.append(
            (
                s.task,
                s.mechanism,
                "diverged" if s.mean is None else f"{s.mean:.3f}{interval}",
                f"{s.solved}/{len(s.scores)}",
                _number(s.chance),
                _number(s.best),
                _number(s.predicted),
                f"{s.state_floats:,}",
                f"{s.parameters:,}",
            )
        )
    columns = ("task", "mechanism", "score", "solved", "chance", "best", "predicted", "state", "params")
    _table(columns, rows)


def _print_pivot(summaries: list[Any]) -> None:
    tasks = list(dict.fromkeys(s.task for s in summaries))
    cells: dict[str, dict[str, list[str]]] = {}
    for s in summaries:
        cells.setdefault(s.mechanism, {}).setdefault(s.task, []).append(_number(s.mean))
    rows = [(name, *(" ".join(row.get(task, [])) for task in tasks)) for name, row in cells.items()]
    _table(("mechanism", *tasks), rows)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _table(columns: tuple[str, ...], rows: list[tuple[str, ...]], wide: int = 1) -> None:
    """Text left, numbers right; only column `wide` may be folded."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index <= wide else "right", no_wrap=index != wide)
    for row in rows:
        table.add_row(*row)
    Console(highlight=False, markup=False).print(table)
