"""Sweep files: grids of tasks, mechanisms, sizes, learning rates and seeds, in TOML.

name = "recall"
[[grid]]
tasks = ["mqar"]
mechanisms = ["softmax", "elu", "polynomial:degree=3"]
seeds = 3                                # 0, 1, 2; or a list
learning_rates = [1e-3, 4e-3]            # the task's preset when left out
state = [1024, 4096]                     # optional: head_dim chosen so that states match
[grid.task]                              # a list means every entry
pairs = [4, 8, 16]
[grid.model]
width = 64
[grid.train]
steps = 500
"""

import itertools
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attngap.errors import AttngapError, unknown
from attngap.mechanisms.catalogue import catalogue
from attngap.probes.presets import preset
from attngap.probes.spec import Spec, make_spec
from attngap.storage.runs import spec_key

MOST = 100_000  # runs of a grid
TOP = ("name", "grid")
GRID = ("tasks", "mechanisms", "seeds", "learning_rates", "state", "task", "model", "train")


def load_sweep(path: str | Path) -> tuple[str, list[Spec]]:
    """The name of a sweep and its specs, without repeats: grid after grid, in each all of one seed before the next.

    So a sweep that was stopped shows its first grids whole, or with fewer seeds.
    """
    path = Path(path)
    if not path.is_file():
        raise AttngapError(f"No sweep file {str(path)!r}. An example: attngap probe sweep --help")
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise AttngapError(f"Cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise AttngapError(f"{path} is not TOML: {str(error).splitlines()[0]}") from error
    try:
        return read_sweep(table, default_name=path.stem)
    except (AttngapError, TypeError, ValueError, OverflowError, AttributeError) as error:  # any type may stand anywhere
        raise AttngapError(f"{path}: {' '.join(str(error).split())}") from error


def read_sweep(table: Mapping[str, Any], default_name: str = "sweep") -> tuple[str, list[Spec]]:
    _known("key of a sweep file", table, TOP)
    name = table.get("name", default_name)
    grids = table.get("grid")
    if not isinstance(name, str) or not name:
        raise AttngapError(f"name must be text, got {name!r}")
    if not isinstance(grids, list) or not grids:
        raise AttngapError("a sweep needs at least one [[grid]]")
    specs = {spec_key(spec): spec for grid in grids for spec in expand(grid)}
    return name, list(specs.values())


def expand(grid: Mapping[str, Any]) -> list[Spec]:
    """Every combination of one [[grid]], all of the first seed, then all of the next."""
    if not isinstance(grid, Mapping):
        raise AttngapError(f"a [[grid]] is a table, got {grid!r}")
    _check_size(grid)
    _known("key of [[grid]]", grid, GRID)
    mechanisms = _names(grid, "mechanisms")
    if "all" in mechanisms:
        mechanisms = [name for name in mechanisms if name != "all"] + [n for n in catalogue() if n not in mechanisms]
    specs = []
    for task in _names(grid, "tasks"):
        rates = _many(grid.get("learning_rates", list(preset(task).learning_rates)))
        axes = itertools.product(
            _tables(grid, "task"), _tables(grid, "model"), _tables(grid, "train"), _many(grid.get("state"))
        )
        for task_options, model, train, state in axes:
            for mechanism, rate, seed in itertools.product(mechanisms, rates, _seeds(grid)):
                specs.append(
                    make_spec(
                        task,
                        mechanism,
                        seed=seed,
                        learning_rate=rate,
                        task_options=task_options,
                        model=model,
                        train=train,
                        state=state,
                    )
                )
    return sorted(specs, key=lambda spec: spec["seed"])


def _check_size(grid: Mapping[str, Any]) -> None:
    """Refuse what nobody will run before it is written out: it would take all memory first."""
    seeds = grid.get("seeds", 1)
    runs = seeds if isinstance(seeds, int) else len(_many(seeds))
    for key in ("tasks", "mechanisms", "learning_rates", "state"):
        runs *= len(_many(grid.get(key)))
    for key in ("task", "model", "train"):
        table = grid.get(key, {})
        runs *= math.prod(len(_many(each)) for each in table.values()) if isinstance(table, Mapping) else 1
    if runs > MOST:
        raise AttngapError(f"a [[grid]] of {runs} runs is too large, at most {MOST}. Give shorter lists")


def _known(kind: str, table: Mapping[str, Any], allowed: tuple[str, ...]) -> None:
    for key in table:
        if key not in allowed:
            raise unknown(kind, key, allowed)


def _names(grid: Mapping[str, Any], key: str) -> list[str]:
    names = _many(grid.get(key))
    if not names or not all(isinstance(name, str) for name in names):
        raise AttngapError(f"[[grid]] needs {key}, a list of names, got {grid.get(key)!r}")
    return names


def _seeds(grid: Mapping[str, Any]) -> list[int]:
    seeds = grid.get("seeds", 1)
    seeds = list(range(seeds)) if isinstance(seeds, int) else seeds
    whole = isinstance(seeds, list) and all(type(seed) is int and 0 <= seed < 2**63 for seed in seeds)
    if not seeds or not whole:
        raise AttngapError(f"seeds must be a count or a list of whole numbers below 2^63, got {grid['seeds']!r}")
    return seeds


def _tables(grid: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """Every choice of one entry from each list in a sub-table."""
    table = grid.get(key, {})
    if not isinstance(table, Mapping):
        raise AttngapError(f"[grid.{key}] must be a table, got {table!r}")
    return [dict(zip(table, values, strict=True)) for values in itertools.product(*map(_many, table.values()))]


def _many(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
