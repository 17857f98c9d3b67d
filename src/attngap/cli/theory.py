"""`attngap theory`: the separation law, its phase diagrams, its checks, and the capacity of a linear state."""

import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer

from attngap.cli.theory_show import emit, show_capacity, show_law, show_outcome, show_thresholds
from attngap.errors import AttngapError

theory = typer.Typer(no_args_is_help=True, help="Why can softmax select where linear attention cannot?")

Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]
Length = Annotated[
    str, typer.Option("--n", help="Tokens, a multiple of d - 2; 1e6 stands for the multiple nearest to it, up to 1e15.")
]
Width = Annotated[int, typer.Option("--d", help="Dimension of a token.")]
Readouts = Annotated[int, typer.Option("--m", help="Random read-outs.")]
Absent = Annotated[float, typer.Option("--a0", help="Needle of D0.")]
Share = Annotated[float, typer.Option("--b", help="Size of the basis part; c = 1 - b, both at least 0.1.")]
Scale = Annotated[float, typer.Option("--scale", help="Logit scale s.")]


@theory.command(short_help="How surely does a layer notice one needle? Exact.")
def law(
    n: Length = "1048576",
    d: Width = 514,
    a1: Annotated[float, typer.Option("--a1", help="Needle of D1.")] = 0.7,
    a0: Absent = 0.05,
    b: Share = 0.5,
    c: Annotated[float | None, typer.Option("--c", help="Must be 1 - b, which is the default.")] = None,
    m: Readouts = 40,
    scale: Scale = 1.0,
    aq: Annotated[float | None, typer.Option("--aq", help="Needle of the queries, for cross-attention.")] = None,
    kernel: Annotated[
        str, typer.Option(help="softmax, linear, polynomial:K, tilted:E (linear with weight X_E); commas for several.")
    ] = "softmax,linear",
    success: Annotated[
        float | None, typer.Option(help="Also find the smallest needle and the smallest d for this success.")
    ] = None,
    distribution: Annotated[
        bool, typer.Option("--distribution", help="Also the law of F: moments, quantiles.")
    ] = False,
    certified: Annotated[bool, typer.Option("--certified", help="Enclose the success; needs python-flint.")] = False,
    as_json: Json = False,
) -> None:
    """The exact probability that one attention layer tells a planted needle from its absence.

    \b
    Example:
      attngap theory law --n 1e6 --d 514 --a1 0.7 --kernel softmax,linear,tilted:2
    """
    from attngap.theory import kernels
    from attngap.theory.separation import law as make_law

    records = []
    tokens = _length(n, d)
    for name in kernel.split(","):
        options = {"n": tokens, "d": d, "a0": a0, "a1": a1, "b": b, "m": m, "scale": scale, "aq": aq, "c": c}
        found = make_law(kernels.parse(name.strip()), **options)
        record = _describe(found)
        if success is not None:
            record["wanted"] = _searched(found, success)
        if distribution:
            record["distribution"] = {f"D{which}": _moments(found, which) for which in (0, 1)}
        if certified:
            from dataclasses import asdict

            from attngap.theory.enclosure import enclose

            record["certified"] = asdict(enclose(found))
        records.append(record)
    emit({"laws": records}) if as_json else show_law(records)


def _describe(found: Any) -> dict[str, Any]:
    from attngap.theory import critical, kernels

    return {
        "kernel": kernels.spell(found.kernel),
        **{name: getattr(found, name) for name in ("n", "d", "a0", "a1", "b", "c", "m", "scale", "aq")},
        "mass": found.mass._asdict(),
        "mass0": found.mass0._asdict(),
        **{name: getattr(found, name) for name in ("q0", "q1", "q01", "log_q0", "log_q1", "log_q01")},
        **{name: getattr(found, name) for name in ("success", "failure", "log_success", "log_failure", "best_m")},
        "critical_needle": critical.critical_needle(found.kernel, found.n, found.b, found.scale, found.aq),
    }


def _searched(found: Any, success: float) -> dict[str, Any]:
    from attngap.theory import critical

    shared = {name: getattr(found, name) for name in ("n", "a0", "b", "m", "scale", "aq")}
    return {
        "success": success,
        "needle": critical.needle_for(found.kernel, success, d=found.d, **shared),
        "d": critical.smallest_d(found.kernel, success, a1=found.a1, **shared),
    }


def _moments(found: Any, which: int) -> dict[str, float]:
    import numpy as np

    from attngap.theory.distribution import distribution

    law_of_f = distribution(found, which)
    middle = (law_of_f.low + law_of_f.high) / 2
    quantiles = {f"p{q}": float(law_of_f.grid[np.argmax(middle >= q / 100)]) for q in (5, 50, 95)}
    return {"zero": law_of_f.zero, "mean": law_of_f.mean, "std": math.sqrt(law_of_f.variance), **quantiles}


@theory.command(short_help="Draw where each kernel separates.")
def phase(
    output: Annotated[
        list[Path], typer.Option("-o", "--output", help=".html, .png, .svg, or .json for `attngap report`; repeatable.")
    ],
    n: Length = "1048576",
    d: Width = 514,
    a0: Absent = 0.05,
    b: Share = 0.5,
    m: Readouts = 40,
    kernel: Annotated[str, typer.Option(help="Panels, with commas.")] = "softmax,linear,polynomial:4,polynomial:16",
    cells: Annotated[int, typer.Option(help="Cells along each axis.")] = 40,
    as_json: Json = False,
) -> None:
    """Draw where each kernel separates: over (needle, scale) at this n, and over (n, needle) up to n = 1e15.

    \b
    Example:
      attngap theory phase -o phase.html -o phase.png
    """
    from attngap.charts.files import check_path, save
    from attngap.charts.phase import phase_chart
    from attngap.progress import progress
    from attngap.provenance import provenance
    from attngap.theory import kernels
    from attngap.theory.phase import phase as compute

    for path in output:
        check_path(path)
    chosen = [kernels.parse(name.strip()) for name in kernel.split(",")]
    with progress("phase diagrams", total=2 * len(chosen)) as advance:
        result = compute(n=_length(n, d), d=d, a0=a0, b=b, m=m, kernels=chosen, cells=cells, advance=advance)
    record = {"schema": "attngap.phase/1", **result, "provenance": provenance()}
    pictures = [path for path in output if path.suffix != ".json"]
    chart = phase_chart(result) if pictures else None
    for path in output:
        if path in pictures:
            save(chart, path)
        else:
            path.write_text(json.dumps(record), encoding="utf-8")
        typer.echo(f"wrote {path}", err=True)
    if as_json:
        emit(record)


@theory.command(short_help="Run every statement of docs/theory.md.")
def check(as_json: Json = False) -> None:
    """Run every statement of docs/theory.md: true ones by brute force, false ones against a counterexample.

    One line each, with its number there; exit code 1 if any fails.

    \b
    Example:
      attngap theory check
    """
    from attngap.theory.statements import run

    outcomes = []
    for outcome in run():
        outcomes.append(outcome)
        if not as_json:
            show_outcome(outcome)
    failed = sum(not outcome.holds for outcome in outcomes)
    if as_json:
        records = [
            {
                "number": o.statement.number,
                "claim": o.statement.claim,
                "counterexample": o.statement.counterexample,
                "holds": o.holds,
                "evidence": o.evidence,
                "seconds": o.seconds,
            }
            for o in outcomes
        ]
        emit({"statements": records, "failed": failed})
    else:
        typer.echo(f"{len(outcomes) - failed} of {len(outcomes)} hold")
    if failed:
        raise typer.Exit(1)


@theory.command(short_help="How many pairs does a linear state recall?")
def capacity(
    rank: Annotated[int, typer.Option(help="Rank of the state.")] = 64,
    value_dim: Annotated[int, typer.Option(help="Width of a value.")] = 64,
    vocabulary: Annotated[int, typer.Option(help="Size of the codebook.")] = 1000,
    keys: Annotated[
        str, typer.Option(help="gaussian, positive, orthogonal; commas for several.")
    ] = "gaussian,positive",
    trials: Annotated[int, typer.Option(help="States sampled at each load.")] = 8,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    as_json: Json = False,
) -> None:
    """How many pairs a linear state recalls: the empirical law r d_v / (2 ln V), and samples where it holds or fails.

    \b
    Example:
      attngap theory capacity --rank 64 --value-dim 64 --vocabulary 1000
    """
    from attngap.theory.capacity import capacity as make_capacity
    from attngap.theory.capacity import curve

    found = make_capacity(rank, value_dim, vocabulary)
    curves = {kind: curve(found, keys=kind, trials=trials, seed=seed) for kind in (k.strip() for k in keys.split(","))}
    record = {"rank": rank, "value_dim": value_dim, "vocabulary": vocabulary, "half": found.half, "curves": curves}
    emit(record | {"reliable": found.reliable, "seed": seed}) if as_json else show_capacity(record)


@theory.command(short_help="The smallest needle that each mechanism separates.")
def thresholds(
    n: Annotated[str, typer.Option("--n", help="Lengths, multiples of d - 2, with commas.")] = "128,256,512",
    mechanisms: Annotated[
        str, typer.Option(help="Names with commas; polynomial:K sets its degree; 'all' is the catalogue.")
    ] = "all,polynomial:4,polynomial:8",
    d: Width = 130,
    m: Readouts = 40,
    a0: Absent = 0.05,
    b: Share = 0.5,
    scale: Scale = 1.0,
    success: Annotated[float, typer.Option(help="What counts as separating.")] = 0.5,
    seed: Annotated[int, typer.Option(help="Seed of the read-outs.")] = 0,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Plot over n: .html, .png, .svg.")] = None,
    as_json: Json = False,
) -> None:
    """The smallest needle each mechanism separates, on the explicit construction. Learned maps are fitted first.

    \b
    Example:
      attngap theory thresholds --n 128,512 --mechanisms softmax,linear,elu
    """
    import torch

    from attngap.charts.files import check_path, save
    from attngap.charts.phase import thresholds as draw
    from attngap.progress import progress
    from attngap.theory.thresholds import Bench, selectivity, softmax_limit

    if output is not None:
        check_path(output)
    names, lengths = _mechanisms(mechanisms), [_whole(x) for x in n.split(",")]
    rows: list[dict[str, Any]] = []
    with progress("selectivity thresholds", total=len(names) * len(lengths), quiet=as_json) as advance:
        for length in lengths:
            bench = Bench.of(length, d, m, a0, b, scale, seed)
            for name, options in names:
                advance(note=f"{name} at n = {length}")
                torch.manual_seed(seed)
                found = selectivity(name, bench, success, **options)
                label = f"{name}:{options['degree']}" if options else name
                needle = found.needle if math.isfinite(found.needle) else None
                rows.append(
                    {"label": label, "n": length, "needle": needle, "fitted": found.fitted, "rescaled": found.rescaled}
                )
    if output is not None:
        save(draw(rows), output)
        typer.echo(f"wrote {output}", err=True)
    limits = {str(length): softmax_limit(length, b, scale) for length in lengths}
    emit({"thresholds": rows, "softmax_for_large_d": limits, "seed": seed}) if as_json else show_thresholds(
        rows, limits
    )


def _mechanisms(text: str) -> list[tuple[str, dict[str, int]]]:
    from attngap.mechanisms.catalogue import catalogue, mechanism_class

    chosen: list[tuple[str, dict[str, int]]] = []
    for part in (x.strip() for x in text.split(",")):
        name, _, degree = part.partition(":")
        if degree and (name != "polynomial" or not degree.isdigit()):
            raise AttngapError(f"mechanisms: only polynomial:K takes a number, a whole one; got {part!r}")
        if name == "all":
            chosen += [(each, {}) for each in catalogue()]
        else:
            mechanism_class(name)
            chosen.append((name, {"degree": int(degree)} if degree else {}))
    return chosen


def _length(text: str, d: int) -> int:
    """An n written like 1e6 is a size, not a count: the nearest multiple of d - 2 is taken, and said."""
    n = _whole(text)
    if "e" not in text.lower() or d < 3 or n % (d - 2) == 0:
        return n
    nearest = max(1, round(n / (d - 2))) * (d - 2)
    typer.echo(f"n = {nearest}, the multiple of d - 2 = {d - 2} nearest to {text}", err=True)
    return nearest


def _whole(x: str) -> int:
    try:
        value = float(x)
    except ValueError:
        raise AttngapError(f"n must be whole numbers with commas, got {x!r}") from None
    if not value.is_integer():
        raise AttngapError(f"n must be a whole number, got {x}")
    return int(value)
