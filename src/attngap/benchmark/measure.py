"""Milliseconds, megabytes and operations of a call; the machine's own rate beside them."""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from attngap.ops import native

Call = Callable[[], Tensor]
ENOUGH = 7  # calls of a quick implementation, the best of which counts
PATIENCE = 1.0  # seconds for one implementation: a slow one is called twice, no more often
AGES = 3.0  # seconds of a call that is not repeated at all


def matmul_rate(size: int = 1024) -> float:
    """Float32 operations a second of one large matrix product: the machine's limit, measured now."""
    a, b, out = (torch.rand(size, size) for _ in range(3))
    best = min(_seconds(lambda: torch.mm(a, b, out=out)) for _ in range(20))
    return 2 * size**3 / best


def best_milliseconds(calls: Mapping[str, Call]) -> dict[str, float]:
    """The best time of each, called in turns so that a disturbance meets all of them."""
    best = {name: _seconds(call) for name, call in calls.items()}  # warms up; counts only where calls are slow
    spent = dict(best)
    for turn in range(ENOUGH):
        for name, call in calls.items():
            if spent[name] > (PATIENCE if turn else AGES):
                continue
            took = _seconds(call)
            best[name], spent[name] = min(best[name], took), spent[name] + took
    return {name: 1e3 * seconds for name, seconds in best.items()}


def extra_mb(call: Call, kept: int) -> float:
    """The peak of memory that torch allocates during a call, beyond `kept` bytes of results, in megabytes."""
    with _silent_stderr(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        call()
    events = profiled.profiler.kineto_results.events()  # pyright: ignore[reportOptionalMemberAccess]
    live = peak = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        live += event.nbytes()  # pyright: ignore[reportAttributeAccessIssue]
        peak = max(peak, live)
    return max(0, peak - kept) / 2**20


def operations(call: Call) -> int:
    """Additions and multiplications of a call, as the products of matrices that it is without compiled kernels."""
    with FlopCounterMode(display=False) as counter, native.off():
        call()
    return counter.get_total_flops()


@contextlib.contextmanager
def _silent_stderr() -> Iterator[None]:
    """The profiler announces itself on file descriptor 2, from C++ and whatever its log level."""
    sys.stderr.flush()
    kept = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _seconds(call: Call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
