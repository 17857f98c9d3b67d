"""The benchmark: records of ops against peers, and of every mechanism against softmax."""

import math
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from attngap.benchmark import peers
from attngap.benchmark.cases import EXPANDED, FORWARD, LONGEST, OURS, Case, cases
from attngap.benchmark.measure import best_milliseconds, extra_mb, matmul_rate, operations
from attngap.mechanisms.catalogue import catalogue, mechanism

SHORT = 64  # tokens of a call that only compiles
Record = dict[str, Any]


def compare(lengths: tuple[int, ...], *, heads: int = 8, width: int = 64) -> Iterator[tuple[str, list[Record]]]:
    """(what was measured, its records) for each op, length and direction."""
    for case in cases():
        for direction in case.directions:
            _call(case.implementations[OURS], case.inputs(heads, SHORT, width), direction)()
        for n in lengths:
            for direction in case.directions:
                yield f"{case.op} {direction} at {n}", _records(case, n, direction, heads, width)


def steps(lengths: tuple[int, ...]) -> int:
    """How many times `compare` yields."""
    return len(lengths) * sum(len(case.directions) for case in cases())


def _records(case: Case, n: int, direction: str, heads: int, width: int) -> list[Record]:
    inputs = case.inputs(heads, n, width)
    calls, absent = {}, {}
    for name, implementation in case.implementations.items():
        reason = peers.missing(name)
        longest = LONGEST.get(name, {}).get(direction, n)
        if n > longest:
            reason = f"not measured beyond {longest} tokens"
        if reason:
            absent[name] = reason
        else:
            calls[name] = _call(implementation, inputs, direction)
    rate, times = matmul_rate(), best_milliseconds(calls)
    found = []
    for name in case.implementations:
        record: Record = {"op": case.op, "form": case.form, "direction": direction, "n": n, "implementation": name}
        if name in absent:
            found.append(record | {"missing": absent[name]})
            continue
        record |= {"milliseconds": times[name], "extra_mb": extra_mb(calls[name], _kept(inputs, direction))}
        if name == OURS:
            record["ratios"] = {peer: times[peer] / times[OURS] for peer in times if peer != OURS}
            record["matmul_rate"] = rate
            record["of_matmul_rate"] = operations(calls[OURS]) / (times[OURS] * 1e-3) / rate
        found.append(record)
    return found


def _call(implementation: Callable[..., Tensor], inputs: tuple[Tensor, ...], direction: str) -> Callable[[], Tensor]:
    if direction == FORWARD:

        def forward() -> Tensor:
            with torch.no_grad():
                return implementation(*inputs)

        return forward
    tracked = [x.clone().requires_grad_() for x in inputs]
    with torch.no_grad():
        out = implementation(*inputs)
        weight = torch.ones(()).expand_as(out) if direction == EXPANDED else torch.randn_like(out)

    def both() -> Tensor:
        for x in tracked:
            x.grad = None
        out = implementation(*tracked)
        out.backward(weight)
        return out.detach()

    return both


def _kept(inputs: tuple[Tensor, ...], direction: str) -> int:
    """Bytes of the results: the output, shaped as v, and the gradients."""
    q, k, v = inputs[:3]
    output = v.nbytes // k.shape[1] * q.shape[1]
    return output + (sum(x.nbytes for x in inputs) if direction != FORWARD else 0)


def crossovers(
    lengths: tuple[int, ...], names: tuple[str, ...] | None = None, *, heads: int = 8, width: int = 64
) -> Iterator[tuple[str, list[Record]]]:
    """For each mechanism: its time at every length, from which length on it beats SDPA, how its time grows."""
    for name in names or catalogue():
        made = mechanism(name, heads, width).eval()
        records, times = [], {"sdpa": [], OURS: []}
        for n in lengths:
            q, k, v = torch.randn(3, 1, heads, n, width)
            x = torch.randn(1, n, made.model_dim) if made.gated and made.model_dim else None
            calls = {OURS: _mechanism_call(made, x, q, k, v), "sdpa": _call(peers.sdpa, (q, k, v), FORWARD)}
            found = best_milliseconds(calls)
            for who, took in found.items():
                times[who].append(took)
            place = {"op": "mechanism", "form": name, "direction": FORWARD, "n": n, "implementation": OURS}
            ratios = {"sdpa": found["sdpa"] / found[OURS]}
            records.append(place | {"milliseconds": found[OURS], "ratios": ratios})
        summary = {
            "op": "crossover",
            "form": name,
            "direction": FORWARD,
            "implementation": OURS,
            "n": first_win(lengths, times[OURS], times["sdpa"]),
            "measured_to": lengths[-1],
            "growth": growth(lengths, times[OURS]),
            "sdpa_growth": growth(lengths, times["sdpa"]),
        }
        yield name, [*records, summary]


def _mechanism_call(made: torch.nn.Module, x: Tensor | None, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    def call() -> Tensor:
        with torch.no_grad():
            return made(x, q, k, v)[0]

    return call


def first_win(lengths: tuple[int, ...], ours: list[float], theirs: list[float]) -> int | None:
    """The shortest measured length from which on ours is faster; None if it loses at the longest."""
    found = None
    for n, mine, other in zip(reversed(lengths), reversed(ours), reversed(theirs), strict=True):
        if mine >= other:
            break
        found = n
    return found


def growth(lengths: tuple[int, ...], times: list[float]) -> float | None:
    """The exponent p of time ~ n^p: least squares in logarithms over the upper half of the lengths; None with one."""
    if len(lengths) < 2:
        return None
    upper = min(len(lengths) // 2, len(lengths) - 2)
    return statistics.linear_regression([math.log(n) for n in lengths[upper:]], [math.log(t) for t in times[upper:]])[0]
