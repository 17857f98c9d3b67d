"""A second device where there is none: tensors that say they are elsewhere and refuse to meet tensors of the CPU.

They are numbers in ordinary memory, so that results can be compared, under a class of their own. A mode around the code
under test does what a real accelerator's driver would: a call that mixes devices, or draws from a generator of another
device, or reads such a tensor as if it were the CPU's, is an error. Single numbers may mix, as they may in torch.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

ELSEWHERE = torch.device("mps", 0)  # a name that torch knows; nothing of it is called
MOVES = {"to", "cpu"}
READS = {"numpy", "__array__"}
ASKS = {"copy_", "_has_compatible_shallow_copy_type"}  # may meet tensors of other devices
ASKS |= {"__get__", "__set__", "tolist", "item", "__bool__", "__int__", "__float__", "__index__", "__len__", "__repr__"}


class MixedDevices(RuntimeError):
    """What CUDA says as `Expected all tensors to be on the same device`."""


class Elsewhere(Tensor):
    """A tensor on the pretended device."""

    device = property(lambda self: ELSEWHERE)  # pyright: ignore[reportAssignmentType]
    is_cpu = property(lambda self: False)  # pyright: ignore[reportAssignmentType]

    def __deepcopy__(self, memo: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            plain = self.as_subclass(Tensor).detach().clone()
        made = plain.as_subclass(Elsewhere).requires_grad_(self.requires_grad)
        made._is_param = getattr(self, "_is_param", False)
        memo[id(self)] = made
        return made


def elsewhere(x: Any) -> Any:
    return x.as_subclass(Elsewhere) if type(x) is Tensor else x


def here(x: Any) -> Any:
    """The tensor as one of the CPU."""
    if not isinstance(x, Elsewhere):
        return x
    with torch._C.DisableTorchFunctionSubclass():
        return x.as_subclass(Tensor)


def move(module: nn.Module) -> nn.Module:
    """All parameters and buffers to the pretended device, in place."""
    for part in module.modules():
        for name, x in part._parameters.items():
            if x is not None:
                part._parameters[name] = nn.Parameter(x.detach().as_subclass(Elsewhere), x.requires_grad)
        for name, x in part._buffers.items():
            if x is not None:
                part._buffers[name] = x.as_subclass(Elsewhere)
    return module


class SecondDevice(TorchFunctionMode):
    """Inside, devices are kept apart."""

    def __enter__(self) -> Any:
        # A module moved between real devices gets new parameters; between these two torch would write into the old.
        self.before = torch.__future__.get_overwrite_module_params_on_conversion()
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        # A mode is off inside what it calls, so backward passes, which call our own functions, turn it on again.
        self.engine = engine = torch.autograd._engine_run_backward

        def run(*args: Any, **kwargs: Any) -> Any:
            TorchFunctionMode.__enter__(self)
            try:
                return engine(*args, **kwargs)
            finally:
                TorchFunctionMode.__exit__(self, None, None, None)

        torch.autograd._engine_run_backward = run  # pyright: ignore[reportPrivateImportUsage]
        self.submit = submit = ThreadPoolExecutor.submit  # a mode is of one thread

        def inside(function: Any, *args: Any, **kwargs: Any) -> Any:
            TorchFunctionMode.__enter__(self)
            try:
                return function(*args, **kwargs)
            finally:
                TorchFunctionMode.__exit__(self, None, None, None)

        ThreadPoolExecutor.submit = lambda pool, *args, **kwargs: submit(pool, inside, *args, **kwargs)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.__future__.set_overwrite_module_params_on_conversion(self.before)
        torch.autograd._engine_run_backward = self.engine  # pyright: ignore[reportPrivateImportUsage]
        ThreadPoolExecutor.submit = self.submit
        super().__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", str(func))
        if name in MOVES and args and isinstance(args[0], Tensor):
            return _moved(func, name, args, kwargs)
        asked = kwargs.get("device")
        if asked is not None and torch.device(asked).type == ELSEWHERE.type:
            if kwargs.get("generator") is not None:
                raise MixedDevices(f"{name} on {ELSEWHERE} with a generator of the CPU")
            del kwargs["device"]
            _check(name, args, kwargs, factory=True)
            made = func(*tree_map(here, args), **tree_map(here, kwargs))
            return tree_map(elsewhere, made)
        if asked is not None and _tensors(args, kwargs) and name.endswith(("_like", "new_zeros", "new_ones")):
            return func(*tree_map(here, args), **tree_map(here, kwargs))
        if name == "grad" or getattr(func, "__self__", None) is Tensor.grad:  # autograd knows nothing of classes
            return tree_map(elsewhere, func(*args, **kwargs)) if _any_elsewhere(args) else func(*args, **kwargs)
        if torch._C._current_graph_task_id() != -1:  # inside a backward pass every gradient looks like the CPU's
            return func(*args, **kwargs)
        if name not in ASKS:
            _check(name, args, kwargs)
            if name in READS and isinstance(args[0], Elsewhere):
                raise MixedDevices(f"{name} of a tensor on {ELSEWHERE}")
        return func(*args, **kwargs)


def _moved(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """`.to` and `.cpu`: where it goes, and the same call without the device."""
    target, rest = args[0].device, []
    for x in args[1:]:
        if isinstance(x, Tensor):
            target = x.device
            rest.append(here(x))
        elif isinstance(x, torch.device | str):
            target = torch.device(x)
            rest.append("cpu")
        else:
            rest.append(x)
    if kwargs.get("device") is not None:
        target = torch.device(kwargs.pop("device"))
    if name == "cpu":
        target = torch.device("cpu")
    start = args[0]
    plain = _plain(start)
    out = plain if name == "cpu" or (not rest and not kwargs) else plain.to(*rest, **kwargs)
    if target.type == ELSEWHERE.type:
        return start if out is plain and isinstance(start, Elsewhere) else out.as_subclass(Elsewhere)
    if target.type == "meta":
        return func(*args, **kwargs)
    return out


def _plain(x: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return x.as_subclass(Tensor)


def _any_elsewhere(args: Any) -> bool:
    return any(isinstance(x, Elsewhere) for x in tree_leaves(args))


def _tensors(args: Any, kwargs: Any) -> list[Tensor]:
    return [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]


def _check(name: str, args: Any, kwargs: Any, *, factory: bool = False) -> None:
    with torch._C.DisableTorchFunction():
        if name in ("__getitem__", "__setitem__") and isinstance(args[0], Elsewhere):
            args = (args[0], *args[2:])  # an index may be of the CPU
        found = _tensors(args, kwargs)
        kinds = {isinstance(x, Elsewhere) for x in found if x.ndim or factory}
        draws = any(isinstance(x, Elsewhere) for x in found) and kwargs.get("generator") is not None
        sizes = [(type(x).__name__, tuple(x.shape)) for x in found]
    if len(kinds) > 1:
        raise MixedDevices(f"{name} mixes devices: {sizes}")
    if draws:
        raise MixedDevices(f"{name} on {ELSEWHERE} with a generator of the CPU")
