"""Memory for large results: touching it for the first time can cost more than computing what goes there."""

import ctypes
import functools
import math
import mmap
import os
import sys
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from attngap.errors import AttngapError

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # of malloc.h
CANARY, GUARD = 0xA5, 128  # a byte that no kernel writes by chance, and how many of them
LARGE = 2**22  # bytes; below, a page of 2 MB would mostly stay empty
_watched: list[tuple[weakref.ref, int, int]] = []


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """torch.empty, with the advice to back it by huge pages: 16 MB are then 8 faults instead of 4096."""
    if debugging() and device.type == "cpu":
        return _guarded(shape, dtype)
    x = torch.empty(shape, dtype=dtype, device=device)
    advise = _madvise()
    if advise is not None and device.type == "cpu" and x.nbytes >= LARGE:
        start = -(-x.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        stop = (x.data_ptr() + x.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        advise(start, stop - start, mmap.MADV_HUGEPAGE)  # only advice: a kernel that cannot follow it says no
    return x


def empty_like(x: Tensor) -> Tensor:
    """Contiguous, whatever the layout of x."""
    return empty(x.shape, x.dtype, x.device)


def zeros_like(x: Tensor) -> Tensor:
    return empty_like(x).zero_()


def debugging() -> bool:
    """`ATTNGAP_DEBUG_KERNELS=1`: canaries around results and scratch memory, looked at after every compiled call."""
    return os.environ.get("ATTNGAP_DEBUG_KERNELS") == "1"


def _guarded(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    size = math.prod(shape) * dtype.itemsize
    memory = torch.full((size + 2 * GUARD,), CANARY, dtype=torch.uint8)
    x = memory[GUARD : GUARD + size].view(dtype).view(*shape)
    _watched.append((weakref.ref(x), memory.data_ptr(), size))
    return x


def check_guards() -> None:
    """Refuse what a kernel computed that wrote beside a result."""
    alive = []
    for x, address, size in _watched:
        if x() is not None:
            alive.append((x, address, size))
            for place in (address, address + GUARD + size):
                if ctypes.string_at(place, GUARD) != bytes([CANARY]) * GUARD:
                    raise AttngapError(f"a compiled kernel wrote outside a result of {size} bytes")
    _watched[:] = alive


def keep_freed() -> None:
    """From now on this process keeps memory that tensors gave back, for the next ones.

    The C library gives large pieces back to the system at once and gets them anew, page by page: a twentieth of a
    conversion's time. For programs that are about passes of large models: memory stays at its peak.
    """
    if sys.platform == "linux" and hasattr(ctypes.CDLL(None), "mallopt"):  # musl has none
        for option, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, 2**26)):
            ctypes.CDLL(None).mallopt(option, value)


def give_back() -> None:
    """Give memory that tensors gave back on to the system.

    The C library keeps pieces of a few megabytes for later; between small things that stay they add up, layer by layer.
    """
    if sys.platform == "linux" and hasattr(ctypes.CDLL(None), "malloc_trim"):  # musl has none
        ctypes.CDLL(None).malloc_trim(0)


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    """The C library's madvise, where there are huge pages to ask for."""
    if sys.platform != "linux" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    call = ctypes.CDLL(None).madvise
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return call
