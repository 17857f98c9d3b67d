"""Checkpoints of a training run: tensors in safetensors, the rest in its header; replaced whole, never half-written."""

import dataclasses
import json
import warnings
import zlib
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from attngap.errors import AttngapError
from attngap.storage.files import write_atomically


@dataclasses.dataclass
class Progress:
    """How far a run is."""

    step: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    finished: bool = False
    diverged: bool = False
    curve: list[tuple[int, float, float]] = dataclasses.field(default_factory=list)


def save(path: Path | None, model: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
    """Write to a file beside it, then rename: a kill leaves the old checkpoint or the new one."""
    if path is None:
        return
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    for index, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{name}": value for name, value in state.items()}
    tensors = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    saved = {"progress": json.dumps(dataclasses.asdict(progress))}
    saved["checksum"] = _checksum(tensors, saved["progress"])
    write_atomically(path, lambda draft: save_file(tensors, draft, metadata=saved))


def load(path: Path | None, model: nn.Module, optimizer: torch.optim.Optimizer) -> Progress | None:
    """Put a checkpoint into model and optimizer; None when there is none, or only a damaged one, which is dropped.

    A checkpoint of before checksums counts as damaged: a run of a probe is short.
    """
    if path is None or not path.exists():
        return None
    try:
        tensors, progress = _read(path)
        states = _optimizer_states(tensors)
    except (OSError, SafetensorError, LookupError, TypeError, ValueError, RecursionError) as error:
        warnings.warn(f"The checkpoint '{path}' is damaged ({error}); the run starts again", stacklevel=2)
        path.unlink(missing_ok=True)
        return None
    try:
        model.load_state_dict({name[6:]: value for name, value in tensors.items() if name.startswith("model.")})
    except RuntimeError as error:
        raise AttngapError(f"{path} is the checkpoint of another model. Remove it, or give another folder") from error
    optimizer.load_state_dict({**optimizer.state_dict(), "state": states})
    return progress


def _optimizer_states(tensors: dict[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    states: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        kind, _, rest = name.partition(".")
        if kind == "optimizer":
            index, _, entry = rest.partition(".")
            states.setdefault(int(index), {})[entry] = value
    return states


def _read(path: Path) -> tuple[dict[str, Tensor], Progress]:
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        metadata = file.metadata()
    if metadata["checksum"] != _checksum(tensors, metadata["progress"]):
        raise ValueError("its checksum is another")
    saved = json.loads(metadata["progress"])
    return tensors, Progress(**{**saved, "curve": [tuple(entry) for entry in saved["curve"]]})


def _checksum(tensors: dict[str, Tensor], progress: str) -> str:
    total = zlib.crc32(progress.encode())
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        total = zlib.crc32(f"{name} {value.dtype} {tuple(value.shape)}".encode(), total)
        total = zlib.crc32(value.reshape(-1).view(torch.uint8).numpy().tobytes(), total)
    return f"{total:08x}"
