"""What the theory costs: the exact law against Monte Carlo on n x n matrices, and floors and ceilings per head.

    python benchmarks/theory.py            law against Monte Carlo, then floor and ceiling at 512, 1024, 2048 tokens
    python benchmarks/theory.py --heads 4  average floors over that many random heads

One thread, CPU seconds, so that a busy machine distorts it least. The last line is JSON.
"""

import argparse
import json
import math
import time

import torch

from attngap.provenance import provenance
from attngap.theory.certificates import ceiling, floor
from attngap.theory.montecarlo import estimate
from attngap.theory.recurrences import causal_softmax
from attngap.theory.separation import law

ACCURACY = 0.01  # standard error of the success probability that the sampling must reach
TRIALS = 100
RANKS = (8, 16, 64, 128)


def cpu_seconds(work, repeats: int = 1) -> float:
    start = time.process_time()
    for _ in range(repeats):
        work()
    return (time.process_time() - start) / repeats


def compare_law(n: int) -> dict[str, float]:
    """Seconds of the law, and of sampling scaled to the trials that ACCURACY takes."""
    options = {"n": n, "d": 130, "a0": 0.05, "a1": 0.5, "b": 0.5, "m": 12}
    success = law("softmax", **options).success
    exact = cpu_seconds(lambda: law("softmax", **options).success, repeats=50)
    needed = math.ceil(success * (1 - success) / ACCURACY**2)
    sampled = cpu_seconds(lambda: estimate(law("softmax", **options), trials=TRIALS)) * max(1.0, needed / TRIALS)
    return {"n": n, "law": exact, "sampling": sampled, "trials": needed, "ratio": sampled / exact}


def time_bounds(n: int, heads: int) -> dict[str, float]:
    """CPU seconds a head, at all RANKS together, window 64 and 4 sinks."""
    weights = torch.stack([causal_softmax(n, 3.0, torch.Generator().manual_seed(seed)) for seed in range(heads)])
    low = cpu_seconds(lambda: floor(weights, RANKS, 64, 4)) / heads
    high = cpu_seconds(lambda: ceiling(weights, RANKS, 64, 4, matrix=False)) / heads
    return {"n": n, "floor": low, "ceiling": high}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    laws = [compare_law(n) for n in (256, 1024, 4096)]
    for row in laws:
        print("law, n = {n}: {law:.2e} s; sampling {sampling:.2f} s for {trials} trials; {ratio:.0f} x".format(**row))
    large = cpu_seconds(lambda: law("softmax", n=10**15, d=10**6 + 2, a0=0.05, a1=0.7, b=0.5, m=40).success, 5)
    print(f"law, n = 1e15, d = 1,000,002: {large:.2e} s")
    bounds = [time_bounds(n, arguments.heads) for n in (512, 1024, 2048)]
    for row in bounds:
        print("n = {n}: floor {floor:.3f} s a head, ceiling {ceiling:.3f} s a head".format(**row))
    growth = {
        name: math.log(bounds[-1][name] / bounds[0][name]) / math.log(bounds[-1]["n"] / bounds[0]["n"])
        for name in ("floor", "ceiling")
    }
    print("growth exponent: floor {floor:.2f}, ceiling {ceiling:.2f}".format(**growth))
    print(json.dumps({"laws": laws, "large": large, "bounds": bounds, "growth": growth, "provenance": provenance()}))


if __name__ == "__main__":
    main()
