"""Selectivity threshold of a real mechanism: the smallest needle it separates from none, on the explicit construction.

The row that asks for the needle comes last, so that a causal mechanism sees all n keys in it; the needle lies in the
middle. q.k / sqrt(dim) equals the construction's score, spread evenly over the coordinates. Unlike the law this takes
any mechanism, because only its outputs are used.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from attngap.mechanisms.base import Mechanism
from attngap.mechanisms.catalogue import mechanism as make_mechanism
from attngap.mechanisms.catalogue import mechanism_class
from attngap.mechanisms.fit import QUICK, init_prototypes
from attngap.theory.critical import critical_needle, first_true
from attngap.theory.datasets import tokens
from attngap.theory.kernels import Number
from attngap.theory.separation import MARGIN

DIM = 4  # of queries and keys
READOUTS = 1 << 13  # random sign vectors that firing probabilities are estimated from
HIGHEST = 2.0
TOLERANCE = 1e-3
FIT_NEEDLES = (0.0, 0.4, 0.6, 0.9)
FIT_STEPS = 60
TIE = 1e-9  # read-outs that equal the threshold must not pass it by rounding
FIT_RATE = 0.1


@dataclasses.dataclass(frozen=True)
class Selectivity:
    """`needle` is infinite where none up to HIGHEST separates."""

    mechanism: str
    options: dict[str, Any]
    n: int
    needle: Number
    fitted: bool  # its parameters were trained to give softmax's output on this construction
    rescaled: bool  # not normalized: its row was divided by its sum, as an output norm would


@dataclasses.dataclass(frozen=True)
class Bench:
    """The construction at one size, and the random read-outs shared by all mechanisms and needles."""

    n: int
    d: int
    m: int
    a0: Number
    b: Number
    scale: Number
    signs: Float[Tensor, "d readouts"]

    @classmethod
    def of(
        cls, n: int, d: int = 130, m: int = 40, a0: Number = 0.05, b: Number = 0.5, scale: Number = 1.0, seed: int = 0
    ) -> "Bench":
        generator = torch.Generator().manual_seed(seed)
        return cls(n, d, m, a0, b, scale, torch.randint(2, (d, READOUTS), generator=generator).double() * 2 - 1)

    def inputs(self, needles: Sequence[Number]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x, q, k, v: one sequence a needle, v with a last column of ones that reads off the sum of the weights."""
        row = self.n // 2
        data = torch.stack([tokens(self.n, self.d, a, self.b, row) for a in needles])  # (needles, n, d)
        key = data.sum(-1)
        query = torch.cat([key[:, :-1], key[:, row, None]], 1)
        size = self.scale**0.5 * DIM**-0.25
        q, k = ((size * x)[:, None, :, None].expand(-1, 1, -1, DIM) for x in (query, key))
        return data, q, k, torch.cat([data, torch.ones_like(data[..., :1])], -1)[:, None]

    def outputs(self, mechanism: Mechanism, needles: Sequence[Number]) -> Float[Tensor, "needles d"]:
        """sum_j f_j A_j of the last row, f its weights: the mechanism applied to v = A."""
        x, q, k, v = self.inputs(needles)
        out, _ = mechanism(x if mechanism.gated else None, q, k, v)
        last = out[:, 0, -1]
        return last[:, :-1] if mechanism.normalized else last[:, :-1] / last[:, -1:]

    def success(self, zero: Float[Tensor, " d"], one: Float[Tensor, " d"]) -> float:
        """(1-q0)^m - (1-q01)^m with q0, q01 counted over the shared read-outs."""
        tau = (1 - self.b + MARGIN) * math.log(self.n) ** 0.5 + TIE
        quiet, loud = zero @ self.signs > tau, one @ self.signs > tau
        q0, q01 = quiet.double().mean().item(), (quiet | loud).double().mean().item()
        return (1 - q0) ** self.m - (1 - q01) ** self.m


def selectivity(name: str, bench: Bench, wanted: Number = 0.5, **options: Any) -> Selectivity:
    """The smallest needle that `name` separates with probability at least `wanted`. Learned maps are fitted first."""
    gate = {"model_dim": bench.d} if mechanism_class(name).gated else {}
    mechanism = make_mechanism(name, 1, DIM, bench.d + 1, **gate, **options).double()
    if mechanism.learned:
        _fit(mechanism, bench)
    with torch.no_grad():
        zero = bench.outputs(mechanism, [bench.a0])[0]

        def separates(needle: Number) -> bool:
            return bench.success(zero, bench.outputs(mechanism, [needle])[0]) >= wanted

        needle = first_true(separates, bench.a0, HIGHEST, scan=20, tolerance=TOLERANCE)
    return Selectivity(name, options, bench.n, needle, mechanism.learned, not mechanism.normalized)


def softmax_limit(n: int, b: Number = 0.5, scale: Number = 1.0) -> float:
    """What the law predicts for softmax when d is large: `critical_needle`."""
    return critical_needle("softmax", n, b, scale)


def _fit(mechanism: Mechanism, bench: Bench) -> None:
    """Train all parameters on the last row's output, against softmax's, over a range of needles at this n."""
    exact = make_mechanism("softmax", 1, DIM, bench.d + 1).double()
    _, q, k, _ = bench.inputs(FIT_NEEDLES)
    with torch.no_grad():
        target = bench.outputs(exact, FIT_NEEDLES)
    init_prototypes(mechanism, q, k, sharpness=QUICK.sharpness)
    optimizer = torch.optim.Adam(mechanism.parameters(), lr=FIT_RATE)
    for _ in range(FIT_STEPS):
        optimizer.zero_grad()
        (bench.outputs(mechanism, FIT_NEEDLES) - target).square().sum().backward()
        optimizer.step()
