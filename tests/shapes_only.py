"""Torch's meta device, whose tensors have shapes and no numbers, as a device that a whole run can happen on.

A run asks for some numbers all the same. Counts, positions and masks, which code needs to find its way, are computed
beside their meta tensors, and `item`, `tolist` and `nonzero` find them there. Of all others there are none: with
`invent` who asks is given made-up ones, else asking is an error. A call that mixes devices is an error in forward and
backward passes alike, and `landed` has every place of attngap that made a tensor on the CPU.
"""

import contextlib
import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import attngap
from attngap.ops import uncompiled

META = torch.device("meta")
HOME = str(Path(attngap.__file__).parent)
aten: Any = torch.ops.aten
INDEXED = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default}
LIKE = {aten.new_zeros, aten.new_ones, aten.new_full, aten.zeros_like, aten.ones_like, aten.full_like}
BY_NUMBERS = {aten.nonzero, aten.masked_select, aten._unique2, aten.unique_dim, aten.allclose, aten.equal}


class NeedsNumbers(RuntimeError):
    """A number was asked for that nobody computed."""


class MixedDevices(RuntimeError):
    """What CUDA says as `Expected all tensors to be on the same device`."""


class ShapesOnly(TorchDispatchMode):
    """The mode itself; `shapes_only` is the way in."""

    def __init__(self, *, invent: bool):
        super().__init__()
        self.invent = invent
        self.known: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}  # by the id of the meta tensor
        self.landed: Counter[tuple[str, str]] = Counter()  # (file, function)

    def know(self, x: Any) -> Any:
        """A meta tensor in place of one with numbers, which stay known where they are whole."""
        if not isinstance(x, Tensor):
            return x
        made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=META)
        if not x.dtype.is_floating_point:
            self.known[id(made)] = weakref.ref(made), x
        return made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        meta = [x for x in given if x.is_meta]
        if func is aten._to_copy.default:
            return self._moved(*args, **kwargs)
        if func is aten.copy_.default:
            return self._copied(*args)
        if func in INDEXED and args[0].is_meta:  # an index may be of the CPU
            args = (args[0], self._places(args[1]), *args[2:])
        elif meta and any(not x.is_meta and x.ndim for x in given):
            raise MixedDevices(f"{func} mixes devices: {[(str(x.device), tuple(x.shape)) for x in given]}")
        if not meta and kwargs.get("device") != META:
            out = func(*args, **kwargs)
            self._note(given, out)
            return out
        if func is aten._local_scalar_dense.default:
            return self._numbers(args[0]).item()
        if func.overloadpacket in LIKE and not (kwargs.get("dtype") or args[0].dtype).is_floating_point:
            return self.know(func(torch.empty_like(args[0], device="cpu"), *args[1:], **kwargs | {"device": "cpu"}))
        return self._run(func, args, kwargs, known=all(self._known(x) is not None for x in meta))

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any], *, known: bool) -> Any:
        """On meta, and on the numbers beside it where all of them are known or the shape hangs on them."""
        if not known and func.overloadpacket not in BY_NUMBERS:
            with contextlib.suppress(NotImplementedError):
                return func(*args, **kwargs)
        there = kwargs | ({"device": torch.device("cpu")} if "device" in kwargs else {})
        numbers = func(*tree_map(self._filled, args), **tree_map(self._filled, there))
        if not func._schema.is_mutable and not any(x.alias_info for x in func._schema.returns):
            return tree_map(self.know, numbers)
        out = func(*args, **kwargs)  # a view, or written in place: so are its numbers, and the meta tensor stays
        for made, number in zip(tree_leaves(out), tree_leaves(numbers), strict=True):
            if isinstance(made, Tensor) and not made.dtype.is_floating_point:
                self.known[id(made)] = weakref.ref(made), number
        return out

    def _moved(self, x: Tensor, **kwargs: Any) -> Tensor:
        """`.to`: with the numbers where they are known, or asked for by a move to the CPU."""
        target = kwargs.pop("device", None) or x.device
        dtype = kwargs.get("dtype") or x.dtype
        if x.is_meta and target == META and self._known(x) is None:
            return torch.empty_like(x, dtype=dtype)
        numbers = (self._numbers(x) if x.is_meta else x).to(dtype, copy=True)
        return self.know(numbers) if target == META else numbers

    def _copied(self, target: Tensor, source: Tensor, *_: Any) -> Tensor:
        if not target.is_meta:
            return target.copy_(self._numbers(source) if source.is_meta else source)
        if self._known(target) is not None:
            self._known(target).copy_(self._numbers(source) if source.is_meta else source)
        return target

    def _places(self, indices: Any) -> list[Tensor | None]:
        """Truths as an index choose so many places; which ones, their numbers say."""
        found: list[Tensor | None] = []
        for each in indices:
            if each is None or each.dtype not in (torch.bool, torch.uint8):
                found.append(each if each is None or each.is_meta else self.know(each))
            else:
                found += map(self.know, self._filled(each).nonzero(as_tuple=True))
        return found

    def _numbers(self, x: Tensor) -> Tensor:
        found = self._known(x)
        if found is not None:
            return found
        if not self.invent:
            raise NeedsNumbers(f"the numbers of a tensor of shape {tuple(x.shape)} and {x.dtype}")
        dice = torch.Generator().manual_seed(x.numel())  # the same for the same tensor
        return torch.rand(x.shape, generator=dice).mul_(1 if x.dtype.is_floating_point else 2).to(x.dtype)

    def _filled(self, x: Any) -> Any:
        return self._numbers(x) if isinstance(x, Tensor) and x.is_meta else x

    def _known(self, x: Tensor) -> Tensor | None:
        found = self.known.get(id(x))
        return found[1] if found is not None and found[0]() is x else None

    def _note(self, given: list[Tensor], out: Any) -> None:
        """A tensor with axes that was made out of none."""
        if given or not any(isinstance(x, Tensor) and x.ndim for x in tree_leaves(out)):
            return
        frame = sys._getframe()
        while frame is not None and not frame.f_code.co_filename.startswith(HOME):
            frame = frame.f_back
        if frame is not None:
            self.landed[str(Path(frame.f_code.co_filename).relative_to(HOME)), frame.f_code.co_qualname] += 1


@contextlib.contextmanager
def shapes_only(*, invent: bool = False) -> Iterator[ShapesOnly]:
    """Inside, models on the meta device run. Numbers that nobody computed count as finite."""
    mode, submit, door = ShapesOnly(invent=invent), ThreadPoolExecutor.submit, uncompiled.plain_tensor
    enabled, isfinite, tensor = torch.is_autocast_enabled, torch.isfinite, torch.tensor

    def inside(function: Any, *args: Any, **kwargs: Any) -> Any:
        with mode:  # a mode is of one thread
            return function(*args, **kwargs)

    def finite(x: Tensor) -> Tensor:
        return torch.ones_like(x, dtype=torch.bool) if x.is_meta else isfinite(x)

    def of_numbers(data: Any, *, device: Any = None, **options: Any) -> Tensor:  # torch drops them, unseen by a mode
        made = tensor(data, **options)
        return mode.know(made) if device is not None and torch.device(device) == META else made

    with pytest.MonkeyPatch.context() as patch, mode:
        patch.setattr(ThreadPoolExecutor, "submit", lambda pool, *args, **kwargs: submit(pool, inside, *args, **kwargs))
        patch.setattr(uncompiled, "plain_tensor", lambda name, x: x if x.is_meta else door(name, x))  # it refuses meta
        patch.setattr(torch, "is_autocast_enabled", lambda kind="cpu": kind != "meta" and enabled(kind))
        patch.setattr(torch, "isfinite", finite)
        patch.setattr(torch, "tensor", of_numbers)
        # Where a model runs whose weights are all on meta, accelerate's hooks say: no module but has one.
        patch.setattr(nn.Module, "_hf_hook", SimpleNamespace(execution_device=META), raising=False)
        yield mode
