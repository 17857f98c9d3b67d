"""An object full of tensors as a small pickle and plain arrays.

A cluster keeps such arrays once for each machine and lends them to every process there without a copy, so weights that
were sent once serve all jobs. What is lent must not be written to.
"""

import dataclasses
import functools
import io
import pickle
import uuid
import warnings
from typing import Any

import numpy as np
import torch
from cloudpickle import CloudPickler
from torch import Tensor

from attngap.errors import AttngapError

OPEN = 4  # parcels that a process keeps open: the weights, and what came later


@dataclasses.dataclass(frozen=True, eq=False)
class Parcel:
    """What `pack` made; equal to its copies elsewhere by its name."""

    name: str
    pickled: bytes
    arrays: list[np.ndarray]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Parcel) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)


@dataclasses.dataclass(frozen=True)
class _Layout:
    """How an array of bytes is a tensor again, with the strides it had: they may decide the order of sums."""

    place: int
    dtype: torch.dtype
    shape: tuple[int, ...]  # as in memory
    order: tuple[int, ...]  # the axes of the tensor among those
    requires_grad: bool


class _Packer(CloudPickler):
    def __init__(self, file: io.BytesIO):
        super().__init__(file, protocol=5)
        self.arrays: list[np.ndarray] = []
        self.known: dict[int, tuple[Tensor, _Layout]] = {}  # with the tensor, so that no other gets its id

    def persistent_id(self, obj: Any) -> _Layout | None:
        if type(obj) is not Tensor or obj.layout is not torch.strided or obj.is_meta or not obj.numel():
            return None
        if id(obj) not in self.known:
            self.known[id(obj)] = obj, self._lay(obj)
        return self.known[id(obj)][1]

    def _lay(self, x: Tensor) -> _Layout:
        axes = sorted(range(x.ndim), key=lambda axis: (-x.stride(axis), axis))  # as they lie in memory
        inside = x.detach().permute(axes).contiguous()
        self.arrays.append(inside.cpu().reshape(-1).view(torch.uint8).numpy())
        order = tuple(axes.index(axis) for axis in range(x.ndim))
        return _Layout(len(self.arrays) - 1, x.dtype, tuple(inside.shape), order, x.requires_grad)


class _Unpacker(pickle.Unpickler):
    def __init__(self, parcel: Parcel, lent: bool):
        super().__init__(io.BytesIO(parcel.pickled))
        self.arrays, self.lent = parcel.arrays, lent
        self.made: dict[int, Tensor] = {}

    def persistent_load(self, pid: _Layout) -> Tensor:
        if pid.place not in self.made:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that lent memory is not writable: nobody here writes to it
                flat = torch.from_numpy(self.arrays[pid.place])
            flat = flat if self.lent else flat.clone()
            found = flat.view(pid.dtype).view(pid.shape).permute(pid.order)
            self.made[pid.place] = found.requires_grad_(pid.requires_grad)
        return self.made[pid.place]


def pack(value: Any) -> Parcel:
    """The arrays share the memory of tensors on the CPU; strides are kept, gaps between elements are not."""
    file = io.BytesIO()
    packer = _Packer(file)
    try:
        packer.dump(value)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise AttngapError(f"A {type(value).__name__} cannot be sent to other machines: {reason}") from error
    return Parcel(uuid.uuid4().hex, file.getvalue(), packer.arrays)


def unpack(parcel: Parcel, *, lent: bool = False) -> Any:
    """The object again, on the CPU. Its tensors are its own, or, if `lent`, the parcel's arrays, not to be written to.

    >>> unpack(pack({"x": torch.arange(3)}))
    {'x': tensor([0, 1, 2])}
    """
    return _Unpacker(parcel, lent).load()


@functools.lru_cache(OPEN)
def unpack_once(parcel: Parcel) -> Any:
    """The same object for every copy of a parcel that this process meets; its tensors are lent."""
    return unpack(parcel, lent=True)
