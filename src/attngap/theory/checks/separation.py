"""Checks of the separation law, against explicit matrices and all sign vectors."""

import math
import random

import torch

from attngap.theory import critical
from attngap.theory.datasets import attention, tokens
from attngap.theory.kernels import Kernel
from attngap.theory.montecarlo import enumerate_signs, estimate
from attngap.theory.separation import Law, law
from attngap.theory.statements import Statement, require

SETTINGS = 60
KERNELS: tuple[Kernel, ...] = ("softmax", "linear", ("polynomial", 3), ("polynomial", 6.5), ("tilted", 2.0))


def random_law(draw: random.Random, largest_p: int = 7) -> Law:
    """A small random setting whose signs can all be enumerated."""
    p = draw.randint(2, largest_p)
    return law(
        draw.choice(KERNELS),
        n=p * draw.randint(2, 8),
        d=p + 2,
        a0=draw.choice((0.0, draw.uniform(0.0, 0.1))),
        a1=draw.uniform(0.1, 1.4),
        b=draw.uniform(0.1, 0.9),
        m=draw.randint(1, 60),
        scale=draw.uniform(0.3, 2.5),
        aq=draw.choice((None, draw.uniform(0.0, 1.0))),
    )


def law_is_enumeration() -> str:
    draw = random.Random(0)
    for _ in range(SETTINGS):
        found = random_law(draw)
        counted = enumerate_signs(found, draw.randrange(found.n))
        expected = tuple(q * 2**found.d for q in (found.q0, found.q1, found.q01))
        same = all(abs(x - y) < 1e-6 for x, y in zip(counted, expected, strict=True))
        require(same, f"{found}: counted {counted}, law {expected}")
    return f"{SETTINGS} random settings, all 2^d signs on explicit matrices, no mismatch"


def law_is_monte_carlo() -> str:
    found = law("softmax", n=1024, d=66, a0=0.05, a1=0.45, b=0.5, m=10)
    sampled = estimate(found, trials=2000)["success"]
    inside = sampled.covers(found.success)
    require(inside, f"law {found.success:.4f}, sampled {sampled}")
    return f"n = 1024: law {found.success:.4f}, sampled {sampled.value:.4f} in [{sampled.low:.4f}, {sampled.high:.4f}]"


def masses_are_explicit() -> str:
    worst = 0.0
    for kernel in KERNELS:
        for aq in (None, 0.4):
            found = law(kernel, n=60, d=8, a0=0.0, a1=0.6, b=0.4, m=1, scale=1.3, aq=aq)
            keys = tokens(60, 8, 0.6, 0.4, row=7)
            queries = keys if aq is None else tokens(60, 8, aq, 0.4, row=7)
            weights = attention(kernel, queries, keys, 1.3, 0.6)
            got = (weights[7, 7].item(), weights[20, 7].item())
            worst = max(worst, *(abs(x - y) / y for x, y in zip(got, found.mass, strict=True)))
    require(worst < 1e-12, f"masses are off by {worst:.2g}")
    return f"{len(KERNELS)} kernels, self- and cross-attention, relative error {worst:.1g}"


def golden_ratio() -> str:
    golden = (math.sqrt(5) - 1) / 2
    above, below = (
        [
            law("softmax", n=10**k, d=12, a0=0.0, a1=golden + shift, b=0.5, m=1).mass.needle_row
            for k in (3, 6, 9, 12, 15)
        ]
        for shift in (0.1, -0.1)
    )
    require(above == sorted(above) and above[-1] > 0.999, f"above: {above}")
    require(below == sorted(below, reverse=True) and below[-1] < 0.002, f"below: {below}")
    gaps = [(golden - critical.critical_needle("softmax", 10.0**k, 0.5)) * k for k in (3, 6, 9, 12, 15)]
    require(max(gaps) < 1.01 * min(gaps) + 0.02, f"gap times log10 n should settle, got {gaps}")
    return f"w -> 1 above {golden:.3f}, -> 0 below; critical needle nears it like {gaps[-1]:.3f} / log10 n"


def finite_threshold() -> str:
    shown = []
    for n, known in ((10**3, 0.468), (10**6, 0.543), (10**12, 0.580)):
        predicted = critical.critical_needle("softmax", n, 0.5)
        require(abs(predicted - known) < 1e-3, f"critical needle {predicted} at n = {n:g}, expected {known}")
        shown.append(f"{predicted:.3f} at {n:.0e}")
    n, d = 2**30, 2**18 + 2
    predicted = critical.critical_needle("softmax", n, 0.5)
    found = critical.needle_for("softmax", 0.5, n=n, d=d, a0=0.05, b=0.5, m=40)
    require(abs(found - predicted) < 1e-3, f"the law switches at {found}, predicted {predicted}")
    narrow = critical.needle_for("softmax", 0.5, n=2**20, d=514, a0=0.05, b=0.5, m=40)
    return (
        f"{', '.join(shown)}; at n = 2^30 the law switches at {found:.4f}, predicted {predicted:.4f} for large d; "
        f"at n = 2^20 and d = 514 at {narrow:.3f}"
    )


def other_rows() -> str:
    masses = {
        a: [law("softmax", n=10**k, d=12, a0=0.0, a1=a, b=0.5, m=1).mass.other_rows for k in (6, 9, 12, 15)]
        for a in (0.8, 1.2)
    }
    require(masses[0.8] == sorted(masses[0.8], reverse=True) and masses[0.8][-1] < 0.002, f"below: {masses[0.8]}")
    require(masses[1.2] == sorted(masses[1.2]) and masses[1.2][-1] > 0.998, f"above: {masses[1.2]}")
    return (
        f"at n = 1e15 other rows give a needle of 0.8 a mass of {masses[0.8][-1]:.1g}, one of 1.2 {masses[1.2][-1]:.3f}"
    )


def best_m_is_best() -> str:
    found = law("softmax", n=2**12, d=130, a0=0.05, a1=0.7, b=0.5, m=1)
    tried = {m: law("softmax", n=2**12, d=130, a0=0.05, a1=0.7, b=0.5, m=m).success for m in range(1, 400)}
    best = max(tried, key=lambda m: tried[m])
    require(best == found.best_m, f"formula {found.best_m}, scan {best}")
    return f"formula and scan of 1..399 agree on m = {best}"


def half_mass_degree() -> str:
    degree = critical.critical_degree(0.7, 1e4)
    mass = law(("polynomial", degree), n=10**4, d=12, a0=0.0, a1=0.7, b=0.5, m=1).mass.needle_row
    require(abs(mass - 0.5) < 1e-9 and abs(degree - 17.4) < 0.05, f"degree {degree}, mass {mass}")
    return f"degree {degree:.1f} puts half the mass on a needle of 0.7 among 10^4"


def small_d_fails() -> str:
    found = {d: law("softmax", n=2**20, d=d, a0=0.05, a1=0.7, b=0.5, m=40) for d in (18, 514)}
    needed = critical.least_dimension(0.5, 40, 0.01)
    require(found[18].success < 0.05 and found[514].success > 0.99, f"{ {d: x.success for d, x in found.items()} }")
    require(18 < needed < 514, f"predicted dimension {needed}")
    return f"success {found[18].success:.2g} at d = 18, {found[514].success:.4f} at 514; predicted d > {needed:.0f}"


def dynamic_range_bound() -> str:
    generator = torch.Generator().manual_seed(0)
    nearest = 0.0
    for _ in range(50):
        mixing = torch.rand(8, 8, generator=generator, dtype=torch.float64) * 9 + 1
        keys = tokens(60, 8, 0.7, 0.5, row=3)
        scores = keys @ mixing @ keys.mT
        weights = scores / scores.sum(-1, keepdim=True)
        spread = (mixing.max() / mixing.min()).item()
        bound = spread * 1.7 / (spread * 1.7 + 59)
        nearest = max(nearest, weights[:, 3].max().item() / bound)
    require(nearest <= 1, f"a positive weight matrix reached {nearest:.3f} times the bound")
    return f"50 random positive X with max/min up to 10: at most {nearest:.2f} of K(1+a)/(K(1+a)+n-1)"


def cross_attention_reach() -> str:
    kappa = 0.5 * 1.4
    reached = critical.reach(0.5, 0.5, aq=0.4)
    needed = critical.critical_mass(0.5, 0.5)
    n = round(reached)
    mass = law("softmax", n=n, d=3, a0=0.0, a1=0.5, b=0.5, m=1, aq=0.4).mass.needle_row
    # n* solves n^(kappa - 1) = w_c / (1 - w_c), which has n where the weight has n - 1
    require(abs(mass - needed) < 0.01 * needed, f"at n* = {n} the mass is {mass}, needed {needed}")
    return f"a_k (1 + a_q) = {kappa:.2f}: the needle is seen up to n* = {n}, where w = {mass:.4f} = w_c"


SEPARATION = (
    Statement("1.1", "the masses on the needle are those of the explicit weights", masses_are_explicit),
    Statement("1.2", "one read-out fires with the probability the law gives", law_is_enumeration),
    Statement("1.3", "success is (1-q0)^m - (1-q01)^m", law_is_monte_carlo),
    Statement("1.4", "softmax concentrates exactly above s a (1 + a) = 1; a = 0.618 at s = 1", golden_ratio),
    Statement("1.5", "at finite n softmax sees the needle earlier, from the critical needle on", finite_threshold),
    Statement("1.6", "rows other than the needle's see it only above s a = 1", other_rows),
    Statement("1.7", "a polynomial kernel needs degree log(n-1) / log(1+a)", half_mass_degree),
    Statement("1.8", "separation fails for small d, where predicted", small_d_fails),
    Statement("1.9", "the best number of read-outs is log(B/A) / (A-B)", best_m_is_best),
    Statement(
        "1.10",
        "for entrywise positive X linear attention needs a range of weights that grows like n",
        dynamic_range_bound,
    ),
    Statement("1.11", "cross-attention below its critical surface sees the needle up to n*", cross_attention_reach),
)
