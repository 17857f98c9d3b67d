"""Compiled kernels between pages that may be neither read nor written: one byte too far ends the process.

Inputs and results lie at the very end of a mapping or at its very beginning, with a forbidden page on either side.
What comes out must be what the same call gives in ordinary memory, to the bit.
"""

import ctypes
import mmap
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from attngap import ops
from attngap.ops import pages
from attngap.ops.convolution.short import short_convolution
from attngap.ops.l2norm.rows import l2_rescale
from tests.trust.outcome import Outcome

ROOM, PLACES = 2**19, 96  # bytes of a mapping, and how many are used in turn
NO_ACCESS, READ_WRITE = 0, 3


class Fences:
    """Mappings with forbidden pages around them; a tensor stays whole until as many others were placed."""

    def __init__(self, places: int = PLACES) -> None:
        self.mappings = [mmap.mmap(-1, ROOM + 2 * mmap.PAGESIZE) for _ in range(places)]
        self.next = 0
        self.at_end = True
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        for mapping in self.mappings:
            address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
            for page in (address, address + mmap.PAGESIZE + ROOM):
                if protect(page, mmap.PAGESIZE, NO_ACCESS):
                    raise OSError(ctypes.get_errno(), "mprotect")

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: Any = None) -> Tensor:
        count = int(torch.Size(shape).numel())
        size = count * dtype.itemsize
        if not 0 < size <= ROOM:
            return torch.empty(tuple(shape), dtype=dtype)
        mapping = self.mappings[self.next % len(self.mappings)]
        self.next += 1
        offset = mmap.PAGESIZE + (ROOM - size if self.at_end else 0)
        return torch.frombuffer(mapping, dtype=dtype, count=count, offset=offset).view(tuple(shape))

    def place(self, x: Tensor) -> Tensor:
        return self.empty(x.shape, x.dtype).copy_(x)

    @contextmanager
    def results(self) -> Iterator[None]:
        """Results of kernels are placed, too, and the fields of their scratch memory have canaries between them."""
        with mock.patch.object(pages, "empty", self.empty), mock.patch.dict(os.environ, ATTNGAP_DEBUG_KERNELS="1"):
            yield


def call(name: str, tensors: dict[str, Tensor], options: dict[str, Any]) -> list[Tensor]:
    """Outputs, state and gradients of one call."""
    given = {key: x.requires_grad_() for key, x in tensors.items()}
    if name == "short_convolution":
        found: Any = short_convolution(**given)
    elif name == "l2_rescale":
        found = l2_rescale(given["x"], 1.5)
    else:
        found = getattr(ops, name)(**given, **options)
    out, state = found if isinstance(found, tuple) else (found, {})
    out.sum().backward()
    return [
        out.detach(),
        *(x.detach() for x in state.values()),
        *(x.grad for x in given.values() if x.grad is not None),
    ]


def inputs(name: str, draw: random.Random) -> tuple[dict[str, Tensor], dict[str, Any]]:
    b, groups, share, t = draw.randint(1, 2), draw.randint(1, 2), draw.randint(1, 3), draw.choice((1, 2, 7, 16, 33, 50))
    h, r, dv = groups * share, draw.choice((1, 3, 8, 15, 16, 17, 33)), draw.choice((1, 5, 8, 16, 19))
    dtype = draw.choice((torch.float32, torch.float32, torch.float64))
    rand = torch.Generator().manual_seed(draw.randrange(2**32))

    def tensor(*shape: int) -> Tensor:
        return torch.rand(shape, generator=rand, dtype=dtype)

    if name == "short_convolution":
        return {"x": tensor(b, t, 8 * draw.randint(1, 5)), "taps": torch.empty(0)}, {}
    if name == "l2_rescale":
        return {"x": tensor(b, h, t, r)}, {}
    found = {"q": tensor(b, h, t, r), "k": tensor(b, groups, t, r) / r**0.5, "v": tensor(b, groups, t, dv)}
    if name == "delta_attention":
        found["beta"] = tensor(b, groups, t)
    if name == "hybrid_attention":
        far = draw.choice((2, 8, 17))
        found |= {"fq": tensor(b, h, t, far), "fk": tensor(b, groups, t, far), "log_gain": tensor(b, h, t)}
        return found, {"window": draw.randint(1, 24), "sinks": draw.randint(0, 4), "relative": draw.random() < 0.5}
    if (kind := draw.randrange(3)) > 0:
        found["log_decay"] = -tensor(b, groups, t, *([r] if kind == 2 else []))
    return found, {"normalize": draw.random() < 0.5} if name == "linear_attention" else {}


NAMES = ("linear_attention", "delta_attention", "hybrid_attention", "short_convolution", "l2_rescale")
_fences: list[Fences] = []


def batch(number: int, calls: int = 50) -> Outcome:
    """Calls of every kernel, forward and backward, between forbidden pages."""
    if not _fences:
        _fences.append(Fences())
    fences, outcome, draw = _fences[0], Outcome(), random.Random(number)
    for i in range(calls):
        name = NAMES[i % len(NAMES)]
        fences.at_end = draw.random() < 0.7
        tensors, options = inputs(name, draw)
        if name == "short_convolution":
            tensors["taps"] = torch.rand(4, tensors["x"].shape[-1], dtype=tensors["x"].dtype)
        plain = call(name, {key: x.clone() for key, x in tensors.items()}, options)
        with fences.results():
            fenced = call(name, {key: fences.place(x) for key, x in tensors.items()}, options)
        outcome.count(name)
        if not all(torch.equal(one, other) for one, other in zip(plain, fenced, strict=True)):
            outcome.faults.append(f"{name}, call {i} of batch {number}: another result between forbidden pages")
    return outcome


def decode(number: int, tokens: int = 40) -> Outcome:
    """Token by token with the state in place, as in decoding."""
    if not _fences:
        _fences.append(Fences())
    fences, outcome, draw = _fences[0], Outcome(), random.Random(number)
    tensors, options = inputs("hybrid_attention", draw)
    states: list[Any] = [None, None]
    for i in range(tokens):
        fences.at_end = draw.random() < 0.7
        one = {key: x[:, :, i % x.shape[2]].unsqueeze(2).contiguous() for key, x in tensors.items()}
        with torch.no_grad():
            plain, states[0] = ops.hybrid_attention(**one, **options, state=states[0])
            placed = {key: fences.place(x) for key, x in one.items()}
            held = None if states[1] is None else {key: fences.place(x) for key, x in states[1].items()}
            with fences.results():
                fenced, states[1] = ops.hybrid_attention(**placed, **options, state=held)
        outcome.count("hybrid_attention, one token")
        if not torch.equal(plain, fenced):
            outcome.faults.append(
                f"hybrid decoding, token {i} of batch {number}: another result between forbidden pages"
            )
    return outcome
