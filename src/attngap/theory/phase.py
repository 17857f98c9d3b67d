"""Phase diagrams of the separation law as plain rows: success over (needle, scale) and over (n, needle)."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from attngap.errors import AttngapError
from attngap.theory.critical import HIGHEST_NEEDLE, concentration_needle, critical_needle
from attngap.theory.kernels import Kernel, Number, spell
from attngap.theory.separation import LARGEST_N, law

KERNELS: tuple[Kernel, ...] = ("softmax", "linear", ("polynomial", 4), ("polynomial", 16))
NEEDLES = (0.1, 1.2)
SCALES = (0.25, 2.5)
Advance = Callable[..., None]


def phase(
    *,
    n: int,
    d: int,
    m: int,
    b: Number,
    a0: Number = 0.05,
    kernels: Sequence[Kernel] = KERNELS,
    cells: int = 40,
    largest: Number = 1e15,
    advance: Advance = lambda *_, **__: None,
) -> dict[str, Any]:
    """Both diagrams for each kernel: `scale` at this n, and `length` at scale 1 for n from d - 2 to `largest`.

    Each holds `cells` (rows of kernel, x, y, success) and `curves`: the exact critical needle for large d, and for
    softmax the needle at which its weight tends to one.
    """
    if cells < 2:
        raise AttngapError(f"phase: cells must be at least 2, got {cells}")
    needles, scales = (np.linspace(*ends, cells).tolist() for ends in (NEEDLES, SCALES))
    lengths = _lengths(d - 2, min(largest, LARGEST_N), cells)
    options = {"d": d, "m": m, "b": b, "a0": a0}
    by_scale, by_length = _Diagram(), _Diagram()
    for kernel in kernels:
        for scale in scales:
            seen = scale if kernel == "softmax" else 1.0  # no other kernel depends on it, and successes are cached
            curve, limit = critical_needle(kernel, n, b, seen), concentration_needle(scale)
            by_scale.add(kernel, "scale", scale, needles, curve, limit, n=n, scale=seen, **options)
        advance(note=f"{spell(kernel)} over scale")
        for length in lengths:
            curve = critical_needle(kernel, length, b)
            by_length.add(kernel, "n", length, needles, curve, concentration_needle(), n=length, scale=1.0, **options)
        advance(note=f"{spell(kernel)} over n")
    return {
        "setting": {"n": n, **options},
        "kernels": [spell(kernel) for kernel in kernels],
        "scale": {"cells": by_scale.cells, "curves": by_scale.curves},
        "length": {"cells": by_length.cells, "curves": by_length.curves},
    }


@functools.lru_cache(maxsize=1 << 12)
def _success(kernel: Kernel, **setting: Any) -> float:
    return law(kernel, **setting).success


class _Diagram:
    def __init__(self) -> None:
        self.cells: list[dict[str, Any]] = []
        self.curves: list[dict[str, Any]] = []

    def add(
        self,
        kernel: Kernel,
        axis: str,
        x: Number,
        needles: list[float],
        critical: Number,
        limit: Number,
        **setting: Any,
    ) -> None:
        """One column of the diagram and its points of the curves."""
        name = spell(kernel)
        for needle in needles:
            success = _success(kernel, a1=needle, **setting)
            self.cells.append({"kernel": name, axis: x, "needle": needle, "success": success})
        if critical < HIGHEST_NEEDLE:
            self.curves.append({"kernel": name, axis: x, "needle": critical, "curve": "critical, exact for large d"})
        if kernel == "softmax":
            self.curves.append({"kernel": name, axis: x, "needle": limit, "curve": "weight tends to 1"})


def _lengths(p: int, largest: Number, count: int) -> list[int]:
    """Multiples of p, evenly spaced in log n."""
    if p < 1 or largest < 4 * p:
        raise AttngapError(f"phase: the largest n must be at least 4 (d - 2) = {4 * p}, got {largest:g}")
    spaced = np.geomspace(max(2 * p, 8), largest, count)
    return sorted({p * max(1, math.floor(x / p)) for x in spaced if p * math.floor(x / p) >= 3})
