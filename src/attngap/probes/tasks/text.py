"""Byte-level language modeling of real text: the gap where it counts."""

import dataclasses
import functools
import math
from pathlib import Path

import torch
from jaxtyping import Float, UInt8
from torch import Tensor
from torch.nn import functional as F

from attngap.errors import AttngapError
from attngap.probes.tasks.base import Batch, Split, Task

SHARES = {"train": (0.0, 0.9), "validation": (0.9, 0.95), "test": (0.95, 1.0)}


@dataclasses.dataclass(frozen=True)
class Text(Task):
    """Predict the next byte. Without `file`, the text is the Python language reference that ships with every Python.

    The first 90% of the text is for training, the next 5% for validation, the last 5% for the test; windows never cross
    a border. Nobody knows the best possible score, so none is claimed. Chance is the unigram entropy of the text.
    """

    name = "text"
    paper = "2310.11685"
    about = "predict the next byte of real text"
    metric = "bits per byte"
    higher = False

    length: int = 128
    file: str = ""

    def check(self) -> None:
        short = min(len(self.part(split)) for split in SHARES)  # type: ignore[arg-type]
        self.need(
            short > self.length, f"length must be below {short}, the bytes in the smallest split, got {self.length}"
        )

    @property
    def vocabulary(self) -> int:
        return 256

    @property
    def outputs(self) -> int:
        return 256

    @property
    def tokens(self) -> int:
        return self.length

    def part(self, split: Split) -> UInt8[Tensor, " n"]:
        whole = read_bytes(self.file)
        low, high = SHARES[split]
        return whole[int(low * len(whole)) : int(high * len(whole))]

    def sample(self, count: int, generator: torch.Generator, split: Split = "train") -> Batch:
        text = self.part(split)
        starts = torch.randint(len(text) - self.length, (count, 1), generator=generator)
        windows = text[starts + torch.arange(self.length + 1)].long()
        where = torch.arange(self.length).expand(count, -1)
        return Batch(windows[:, :-1].contiguous(), where, windows[:, 1:].contiguous())

    @property
    def chance(self) -> float:
        counts = torch.bincount(read_bytes(self.file).long(), minlength=256).double()
        shares = counts[counts > 0] / counts.sum()
        return -(shares * shares.log2()).sum().item()

    @property
    def best(self) -> None:
        return None

    def grade(self, outputs: Float[Tensor, "b s o"], batch: Batch) -> float:
        """Bits per byte: the mean cross entropy over log 2."""
        return F.cross_entropy(outputs.flatten(0, 1), batch.targets.flatten()).item() / math.log(2)


@functools.cache
def read_bytes(file: str) -> UInt8[Tensor, " n"]:
    if not file:
        from pydoc_data.topics import topics

        return _bytes("\n".join(topics[name] for name in sorted(topics)).encode())
    path = Path(file)
    if not path.is_file():
        raise AttngapError(f"text: no file {file!r}. Give a plain text file, or none for the built-in text")
    return _bytes(path.read_bytes())


def _bytes(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)
