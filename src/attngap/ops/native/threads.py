"""Several threads for one kernel: those of torch where they can be had, else a pool of our own.

torch's threads stay awake for milliseconds after each of its operations, to begin the next within microseconds. A
thread of ours would have to be woken, and to share a core with one of them; so kernels are given to these very threads.
They belong to GNU's OpenMP, which torch brings along on Linux, and whose way to start them is a function of its own.
"""

import concurrent.futures
import ctypes
import functools
import itertools
import os
import threading
from collections.abc import Callable
from pathlib import Path

import torch

Compute = Callable[[int], None]  # does what is left of the work, with the scratch memory at this address
CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
MAPS = Path("/proc/self/maps")  # what this process has loaded

_forked = False  # OpenMP's threads do not survive a fork, and a child that asks for them waits for ever


def together(compute: Compute, addresses: list[int]) -> None:
    """By one thread for each address, this one included; when it returns or raises, all of them are done."""
    parallel = team()
    if parallel is None:
        _by_pool(compute, addresses)
    else:
        _by_team(parallel, compute, addresses)


def team() -> Callable[..., None] | None:
    """What starts torch's own threads on a function; None where they are not GNU OpenMP's."""
    return None if _forked else _team()


@functools.cache
def _team() -> Callable[..., None] | None:
    if not torch.backends.openmp.is_available() or not MAPS.exists():
        return None
    beside = str(Path(torch.__file__).parent)  # in torch/lib or in torch.libs: another package may bring one too
    loaded = {line.split(maxsplit=5)[-1].strip() for line in MAPS.read_text().splitlines() if "libgomp" in line}
    found = sorted(path for path in loaded if path.startswith(beside))
    if not found:
        return None
    parallel = ctypes.CDLL(found[0]).GOMP_parallel
    parallel.argtypes = [CALLBACK, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None
    return parallel


def _note_fork() -> None:
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)


def _by_team(parallel: Callable[..., None], compute: Compute, addresses: list[int]) -> None:
    """An error cannot leave a callback, so it is raised here; so is an interrupt that came before this thread's own
    callback began, which Python can only print."""
    places, here, begun, errors = itertools.count(), threading.get_ident(), [], []

    def help_out(_: int | None) -> None:
        try:
            begun.append(threading.get_ident())
            compute(addresses[next(places)])
        except BaseException as error:
            errors.append(error)

    parallel(CALLBACK(help_out), None, len(addresses), 0)
    if errors:
        raise errors[0]
    if here not in begun:
        raise KeyboardInterrupt


def _by_pool(compute: Compute, addresses: list[int]) -> None:
    """An interrupt may come anywhere in this thread. Threads that have not begun by then never begin, and the others
    are waited for: they write into memory that is given back afterwards."""
    change, closed, active, errors = threading.Condition(), False, 0, []

    def help_out(address: int) -> None:
        nonlocal active
        with change:
            if closed:
                return
            active += 1
        try:
            compute(address)
        except BaseException as error:
            errors.append(error)
        finally:
            with change:
                active -= 1
                change.notify_all()

    try:
        for address in addresses[1:]:
            _pool(os.getpid()).submit(help_out, address)
        compute(addresses[0])
    finally:
        interrupt = None
        while not closed or active:
            try:
                with change:
                    closed = True
                    change.wait_for(lambda: not active)
            except BaseException as error:  # another interrupt: go on waiting
                interrupt = error
        if interrupt is not None:
            raise interrupt
    if errors:
        raise errors[0]


@functools.cache
def _pool(process: int) -> concurrent.futures.ThreadPoolExecutor:
    """One a process: threads do not survive a fork."""
    return concurrent.futures.ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="attngap")
