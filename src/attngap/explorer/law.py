"""The separation law at the place the sliders stand, and along the needle."""

import dataclasses
import functools
import math
from typing import Any

from attngap.theory import separation

NEEDLES = [0.1 + 1.4 * i / 56 for i in range(57)]  # where the curves are drawn


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the sliders stand."""

    log10_n: float
    d: int
    needle: float
    a0: float
    b: float
    scale: float
    m: int
    degree: int

    @property
    def n(self) -> int:
        """The multiple of d - 2 nearest to 10^log10_n: the construction repeats a block of that many tokens."""
        p = self.d - 2
        return max(1, round(10**self.log10_n / p)) * p

    def laws(self, needle: float) -> dict[str, separation.Law]:
        kernels = {"softmax": "softmax", "linear": "linear", "polynomial": ("polynomial", float(self.degree))}
        common = {"n": self.n, "d": self.d, "a0": self.a0, "b": self.b, "m": self.m, "scale": self.scale}
        return {name: separation.law(kernel, a1=needle, **common) for name, kernel in kernels.items()}


def answer(place: Place) -> dict[str, Any]:
    """Exact numbers for softmax, linear and a polynomial kernel."""
    laws = place.laws(place.needle)
    return {
        "n": place.n,
        "success": {name: law.success for name, law in laws.items()},
        "mass": {name: law.mass.needle_row for name, law in laws.items()},
        "concentrates_from": critical_needle(place.scale),
    }


def curve(place: Place) -> list[dict[str, Any]]:
    """Success along the needle, for the chart; the same wherever the needle's own slider stands."""
    return _curve(dataclasses.replace(place, needle=NEEDLES[0]))


@functools.lru_cache(maxsize=64)
def _curve(place: Place) -> list[dict[str, Any]]:
    return [
        {"needle": needle, "kernel": name, "success": law.success}
        for needle in NEEDLES
        for name, law in place.laws(needle).items()
    ]


def critical_needle(scale: float) -> float:
    """The needle at which softmax concentrates as n grows: s a (1 + a) = 1; at s = 1 the inverse golden ratio."""
    return (math.sqrt(1 + 4 / scale) - 1) / 2
