"""Kernels compiled on this machine, for CPUs: one loop over the tokens of a head instead of many calls over chunks.

They need numba (`pip install "attngap[native]"`); without it, and for what they do not cover, the ops compute the same
in torch. `ATTNGAP_NATIVE=0` turns them off.
"""

import concurrent.futures
import contextlib
import contextvars
import functools
import importlib.util
import os
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

VECTOR = 64  # bytes
PANEL = 128  # bytes: two vectors, two lines of the cache, which no vector should lie across
LARGEST = 2**20  # bytes of a state: a larger one leaves the cache of a core
SHARES = 8  # of the lanes, for each thread
ALONE = 2**27  # updates of a state's elements, some 7 ms: below, waking a thread may take longer than it helps

_on = contextvars.ContextVar("native", default=True)


def usable(*tensors: Tensor | None, state: Tensor) -> bool:
    """On the CPU, float32 or float64, a state small enough to stay in a core's cache."""
    if not _on.get() or not available() or state.shape[2] * state.shape[3] * state.element_size() > LARGEST:
        return False
    return all(x is None or (x.device.type == "cpu" and x.dtype == state.dtype) for x in (*tensors, state))


@functools.cache
def available() -> bool:
    return os.environ.get("ATTNGAP_NATIVE") != "0" and importlib.util.find_spec("numba") is not None


@contextlib.contextmanager
def off() -> Iterator[None]:
    """Inside, the ops compute in torch."""
    token = _on.set(False)
    try:
        yield
    finally:
        _on.reset(token)


def run(kernel: Callable, arguments: tuple, dtype: torch.dtype, lanes: int, work: int, scratch: int) -> None:
    """kernel(*arguments, zero of the type, scratch, first, last) over all lanes, by as many threads as torch has.

    Lanes are handed out a few at a time: torch's own threads keep a core busy for milliseconds after they are done, so
    one of ours may get only half of one.
    """
    zero = np.float32(0) if dtype == torch.float32 else np.float64(0)
    threads = 1 if work < ALONE else min(lanes, torch.get_num_threads())
    held = torch.zeros(threads, scratch + PANEL, dtype=torch.uint8)
    count = min(lanes, 1 if threads == 1 else threads * SHARES)
    shares = iter([(lanes * i // count, lanes * (i + 1) // count) for i in range(count)])

    def compute(mine: Tensor) -> None:
        address = -(-mine.data_ptr() // PANEL) * PANEL
        for first, last in shares:
            kernel(*arguments, zero, address, first, last)

    waiting = [_pool(os.getpid()).submit(compute, mine) for mine in held[1:]]
    compute(held[0])
    for thread in waiting:
        if not thread.cancel():  # one that has not begun has nothing left to do
            thread.result()


@functools.cache
def _pool(process: int) -> concurrent.futures.ThreadPoolExecutor:
    """One a process: threads do not survive a fork."""
    return concurrent.futures.ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="attngap")
