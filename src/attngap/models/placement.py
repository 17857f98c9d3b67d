"""Where a model's tensors are and in what precision, and whether this machine can do what was asked for."""

import contextlib
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attngap.errors import AttngapError, unknown
from attngap.options import DEVICES, DTYPES

PRODUCT_SECONDS = 60.0


def device_of(model: nn.Module) -> torch.device:
    """Where a model wants its tokens: the device of its first weights, or the one that offloaded weights come to."""
    hook: Any = getattr(model, "_hf_hook", None)  # accelerate's, on models that are spread over devices or disk
    placed = getattr(hook, "execution_device", None)
    if placed is not None:
        return torch.device(f"cuda:{placed}" if isinstance(placed, int) else placed)
    return next((x.device for x in (*model.parameters(), *model.buffers()) if not x.is_meta), torch.device("cpu"))


def has_weights_elsewhere(model: nn.Module) -> bool:
    """Whether some weights are on disk, or on another device, until the layer that needs them runs."""
    return any(x.is_meta for x in model.parameters()) and getattr(model, "hf_device_map", None) is not None


def named_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter by name, in order; one that is on disk is read, and gone again when the next one comes."""
    for name, x in sorted(model.named_parameters()):
        if not x.is_meta or not has_weights_elsewhere(model):
            yield name, x.detach()
            continue
        from accelerate.utils import align_module_device  # who put them there has it

        owner, _, own = name.rpartition(".")
        with align_module_device(part := model.get_submodule(owner)):
            yield name, getattr(part, own).detach()


def memory_of(device: torch.device) -> int | None:
    """Bytes that a device has left; of the CPU those that can be had without swapping. None where nobody says."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        left = 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return None
    with contextlib.suppress(OSError, ValueError):  # a container may have less than its machine
        group = Path("/sys/fs/cgroup")
        left = min(left, int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    return max(0, left)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was asked for: without this a clock measures the asking."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def parse_dtype(asked: Any) -> torch.dtype | str | None:
    """A dtype by its name; "auto", which is the checkpoint's own, and None stay what they are."""
    if asked is None or asked == "auto" or isinstance(asked, torch.dtype):
        return asked
    name = str(asked).removeprefix("torch.")
    if name not in DTYPES:
        raise unknown("dtype", name, DTYPES)
    return getattr(torch, name)


def parse_device(asked: Any) -> torch.device | None:
    """A device that is there; "auto" takes the first accelerator, else the CPU."""
    if asked is None or isinstance(asked, torch.device):
        return asked
    if asked == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "mps" if _mps() else "cpu")
    if not re.fullmatch(r"cpu|mps|cuda(:\d+)?", str(asked)):
        raise AttngapError(f"No device {str(asked)!r}. Allowed: {', '.join(DEVICES)}")
    device = torch.device(str(asked))
    if device.type == "mps" and not _mps():
        raise AttngapError("No device 'mps': this is no Mac whose GPU torch can use. Allowed here: cpu, auto")
    if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
        have = f"it sees {count} CUDA devices" if count else "it sees no CUDA device"
        raise AttngapError(f"No device {str(asked)!r}: torch {torch.__version__} is installed and {have}. Try: auto")
    return device


def parse_size(asked: int | str) -> int:
    """Bytes, of a number or of a text such as 300MB or 8GB.

    >>> parse_size("300MB"), parse_size("1.5 GB")
    (300000000, 1500000000)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", str(asked).strip(), re.IGNORECASE)
    if not found or not float(found[1]):
        raise AttngapError(f"No size {str(asked)!r}. Give bytes, or such as 300MB, 8GB")
    return int(float(found[1]) * 1000 ** " KMGT".index(found[2].upper() or " "))


def _mps() -> bool:
    return torch.backends.mps.is_available()


@functools.cache
def check_products(dtype: torch.dtype, device: str) -> None:
    """Refuse a precision that the device cannot multiply in.

    Some processors die of it by an illegal instruction, which no exception tells; so a child process tries first.
    """
    if dtype in (torch.float32, torch.float64):
        return
    name = str(dtype).removeprefix("torch.")
    code = (
        f"import torch; x = torch.ones(64, 64, dtype=torch.{name}, device={device!r}); "
        "y = torch.nn.functional.linear(x, x); z = x @ x; "
        "a = torch.nn.functional.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]); "
        "assert float((y + z).float().sum()) == 2 * 64**3 and bool(a.isfinite().all())"
    )
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=PRODUCT_SECONDS, text=True)
    except subprocess.TimeoutExpired:
        raise AttngapError(_cannot(name, device, f"a product took over {PRODUCT_SECONDS:.0f} s")) from None
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        why = f"signal {-done.returncode}" if done.returncode < 0 else lines[-1] if lines else "it failed"
        raise AttngapError(_cannot(name, device, why))


def _cannot(name: str, device: str, why: str) -> str:
    return f"{device} cannot multiply in {name} ({why}). Nothing was lost; take --dtype float32 (dtype='float32')"
