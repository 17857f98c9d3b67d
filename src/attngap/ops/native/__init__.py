"""Kernels compiled on this machine, for CPUs: one loop over the tokens of a head instead of many calls over chunks.

They need numba (`pip install "attngap[native]"`); without it, and for what they do not cover, the ops compute the same
in torch. `ATTNGAP_NATIVE=0` turns them off.
"""

import contextlib
import contextvars
import functools
import importlib.metadata
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from attngap.ops import pages
from attngap.ops.native import threads

if TYPE_CHECKING:
    from attngap.ops.native.scratch import Scratch

VECTOR = 64  # bytes
PANEL = 128  # bytes: two vectors, two lines of the cache, which no vector should lie across
LARGEST = 2**20  # bytes of a state: a larger one leaves the cache of a core
SHARES = 8  # of the lanes, for each thread
ALONE = 2**27  # updates of a state's elements, some 7 ms: below, waking a thread may take longer than it helps
ALONE_AWAKE = 2**22  # some 0.2 ms, where the thread is awake

_ready: set[tuple[Callable, torch.dtype]] = set()  # what was compiled, or found on disk
_kept = threading.local()  # scratch memory of calls that take microseconds
_ZEROS = {torch.float32: np.float32(0), torch.float64: np.float64(0)}
_on = contextvars.ContextVar("native", default=True)


def usable(*tensors: Tensor | None, state: Tensor) -> bool:
    """On the CPU, float32 or float64, a state small enough to stay in a core's cache."""
    if not on() or state.shape[2] * state.shape[3] * state.element_size() > LARGEST:
        return False
    return all(x is None or (x.device.type == "cpu" and x.dtype == state.dtype) for x in (*tensors, state))


def on() -> bool:
    """Whether compiled kernels are to be used at all here."""
    return _on.get() and available()


def wanted() -> bool:
    """Whether kernels of any kind are to be used here, GPUs' included: not inside `off`, not with ATTNGAP_NATIVE=0."""
    return _on.get() and os.environ.get("ATTNGAP_NATIVE") != "0"


def name() -> str:
    """As a receipt calls them."""
    return f"compiled (numba {importlib.metadata.version('numba')})"


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


def run(kernel: Callable, arguments: tuple, dtype: torch.dtype, lanes: int, work: int, scratch: "Scratch") -> None:
    """kernel(*arguments, zero of the type, scratch, first, last) over all lanes, by as many threads as torch has.

    Lanes are handed out a few at a time: a thread may get only half of a core, which others keep busy. Whatever
    happens, nothing writes any more when this returns.
    """
    zero, width = _ZEROS[dtype], thread_count(lanes, work)
    held = torch.zeros(width, scratch.bytes + PANEL, dtype=torch.uint8)
    addresses = [-(-mine.data_ptr() // PANEL) * PANEL for mine in held]
    if scratch.guards:
        scratch.guard(addresses)
    count = min(lanes, 1 if width == 1 else width * SHARES)
    shares = iter([(lanes * i // count, lanes * (i + 1) // count) for i in range(count)])

    def compute(address: int) -> None:
        for first, last in shares:
            kernel(*arguments, zero, address, first, last)

    _make_ready(kernel, arguments, dtype, addresses[0])
    if width == 1:
        compute(addresses[0])
    else:
        threads.together(compute, addresses)
    if scratch.guards:
        scratch.check(addresses)
        pages.check_guards()


def run_alone(kernel: Callable, arguments: tuple, dtype: torch.dtype, lanes: int, scratch: "Scratch") -> None:
    """`run` in this thread, in scratch memory that it keeps: for calls of microseconds, which must not count on zeros.

    The same memory for all layers of a model also stays in cache.
    """
    kept = _kept.__dict__
    if kept.get("bytes", -1) < scratch.bytes:
        memory = torch.zeros(scratch.bytes + PANEL, dtype=torch.uint8)
        kept |= {"memory": memory, "bytes": scratch.bytes, "address": -(-memory.data_ptr() // PANEL) * PANEL}
    address = kept["address"]
    if scratch.guards:
        scratch.guard([address])
    if (kernel, dtype) not in _ready:
        _make_ready(kernel, arguments, dtype, address)
    kernel(*arguments, _ZEROS[dtype], address, 0, lanes)
    if scratch.guards:
        scratch.check([address])
        pages.check_guards()


def thread_count(lanes: int, work: int) -> int:
    alone = ALONE if threads.team() is None else min(ALONE, ALONE_AWAKE)
    return 1 if work < alone else min(lanes, torch.get_num_threads())


def _make_ready(kernel: Callable, arguments: tuple, dtype: torch.dtype, address: int) -> None:
    if (kernel, dtype) not in _ready:  # no lanes: only to compile it, or to read it from disk
        with _says_if_slow(kernel):
            kernel(*arguments, _ZEROS[dtype], address, 0, 0)
        _ready.add((kernel, dtype))


@contextlib.contextmanager
def _says_if_slow(kernel: Callable) -> Iterator[None]:
    """A line on stderr when compiling takes longer than a second."""
    op = kernel.__module__.rpartition(".")[0].rpartition(".")[2]
    line = f"attngap: compiling {op}, {kernel.__name__}, for this processor; kept on disk until the code changes ..."
    timer = threading.Timer(1.0, lambda: print(line, file=sys.stderr))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
