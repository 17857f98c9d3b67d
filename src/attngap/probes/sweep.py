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
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attngap.errors import AttngapError, unknown
from attngap.mechanisms.catalogue import catalogue
from attngap.probes.presets import preset
from attngap.probes.spec import Spec, make_spec
from attngap.storage.runs import spec_key

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
        table = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise AttngapError(f"{path} is not TOML: {error}") from error
    try:
        return read_sweep(table, default_name=path.stem)
    except AttngapError as error:
        raise AttngapError(f"{path}: {error}") from error


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
    if not isinstance(seeds, list) or not seeds or not all(isinstance(seed, int) for seed in seeds):
        raise AttngapError(f"seeds must be a count or a list of whole numbers, got {grid['seeds']!r}")
    return seeds


def _tables(grid: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """Every choice of one entry from each list in a sub-table."""
    table = grid.get(key, {})
    if not isinstance(table, Mapping):
        raise AttngapError(f"[grid.{key}] must be a table, got {table!r}")
    return [dict(zip(table, values, strict=True)) for values in itertools.product(*map(_many, table.values()))]


def _many(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
