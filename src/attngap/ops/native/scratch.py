"""Scratch memory of a kernel: named fields with sizes, and what guards them where kernels are debugged."""

import ctypes
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

from attngap.errors import AttngapError
from attngap.ops.native import PANEL
from attngap.ops.pages import CANARY, debugging


@dataclasses.dataclass(frozen=True)
class Scratch:
    """Where the fields begin, from the start of the memory, and the bytes between them that nobody may write."""

    room: Any  # a NamedTuple of offsets, as the kernel knows it
    bytes: int
    guards: tuple[int, ...] = ()  # offsets of PANEL bytes each

    def guard(self, addresses: list[int]) -> None:
        for address in addresses:
            for offset in self.guards:
                ctypes.memset(address + offset, CANARY, PANEL)

    def check(self, addresses: list[int]) -> None:
        """Refuse what a kernel computed that wrote between its fields."""
        for address in addresses:
            for offset in self.guards:
                if ctypes.string_at(address + offset, PANEL) != bytes([CANARY]) * PANEL:
                    raise AttngapError(
                        f"a compiled kernel wrote outside its scratch memory, at byte {offset}: {self.room}"
                    )


def lay_out(kind: Any, sizes: Mapping[str, int]) -> Scratch:
    """The fields of `kind` one after the other: a NamedTuple of offsets, then `end`, then `guard`; sizes in bytes."""
    return _laid_out(kind, tuple(sizes[name] for name in kind._fields[:-2]), PANEL if debugging() else 0)


def no_scratch() -> Scratch:
    """Of kernels that have no use for any; guarded like others."""
    return lay_out(_NoRoom, {})


class _NoRoom(NamedTuple):
    end: int
    guard: int


@functools.lru_cache(256)
def _laid_out(kind: Any, sizes: tuple[int, ...], guard: int) -> Scratch:
    offsets, guards, end = [], [], guard
    for size in sizes:
        offsets.append(end)
        end += -(-size // PANEL) * PANEL
        guards.append(end)
        end += guard
    return Scratch(kind(*offsets, end, guard), end, (0, *guards) if guard else ())
