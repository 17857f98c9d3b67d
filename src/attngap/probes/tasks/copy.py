"""Copying: a string, a separator, and the string again."""

import dataclasses

import torch
from torch import Tensor

from attngap.probes.tasks.base import Batch, Split, Task
from attngap.probes.tasks.recall import predicted_recall


@dataclasses.dataclass(frozen=True)
class Copy(Task):
    """`x1 ... xn | x1 ... xn`, every token of the copy predicted from those before it.

    A state of fewer bits than the string cannot copy it, whatever the mechanism (Jelassi et al.).
    """

    name = "copy"
    paper = "2402.01032"
    about = "repeat a random string after a separator"
    metric = "accuracy"

    items: int = 24
    symbols: int = 32

    def check(self) -> None:
        self.need(self.symbols >= 2, f"symbols must be at least 2, got {self.symbols}")

    @property
    def vocabulary(self) -> int:
        return self.symbols + 1  # the last one is the separator

    @property
    def outputs(self) -> int:
        return self.symbols

    @property
    def tokens(self) -> int:
        return 2 * self.items

    def sample(self, count: int, generator: torch.Generator, split: Split = "train") -> Batch:
        text = torch.randint(self.symbols, (count, self.items), generator=generator)
        separator = torch.full((count, 1), self.symbols)
        inputs = torch.cat([text, separator, text[:, :-1]], dim=1)
        where = torch.arange(self.items, 2 * self.items).expand(count, -1)
        return Batch(inputs, where, text)

    @property
    def chance(self) -> float:
        return 1 / self.symbols

    @property
    def best(self) -> float:
        return 1.0

    def oracle(self, batch: Batch) -> Tensor:
        return batch.inputs[:, : self.items]

    def capacity(self, rank: int, value_dim: int) -> float:
        return predicted_recall(self.items, rank, value_dim, self.symbols)
