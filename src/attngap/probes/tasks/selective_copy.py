"""Selective copying: repeat the tokens that matter, in order, and drop the noise between them."""

import dataclasses

import torch
from torch import Tensor

from attngap.probes.tasks.base import Batch, Split, Task, distinct
from attngap.probes.tasks.recall import predicted_recall


@dataclasses.dataclass(frozen=True)
class SelectiveCopy(Task):
    """`items` symbols at random places among blanks, a separator, and the symbols again without the blanks.

    As in Mamba, but the symbols of a sequence differ from each other and the answer is read back token by token, as a
    language model does: what follows a symbol is then well defined, and a small model learns it in seconds.
    """

    name = "selective-copy"
    paper = "2312.00752"
    about = "repeat the symbols scattered among blanks, in order"
    metric = "accuracy"

    length: int = 48
    items: int = 12
    symbols: int = 64

    def check(self) -> None:
        self.need(self.items <= self.symbols, f"items must be at most symbols, {self.symbols}, got {self.items}")
        self.need(self.items <= self.length, f"items must be at most length, {self.length}, got {self.items}")

    @property
    def vocabulary(self) -> int:
        return self.symbols + 2  # then the separator and the blank

    @property
    def outputs(self) -> int:
        return self.symbols

    @property
    def tokens(self) -> int:
        return self.length + self.items

    def sample(self, count: int, generator: torch.Generator, split: Split = "train") -> Batch:
        symbols = distinct(count, 0, self.symbols, self.items, generator)
        places = distinct(count, 0, self.length, self.items, generator).sort(dim=1).values
        inputs = torch.full((count, self.tokens), self.symbols + 1)
        inputs.scatter_(1, places, symbols)
        inputs[:, self.length] = self.symbols
        inputs[:, self.length + 1 :] = symbols[:, :-1]
        where = torch.arange(self.length, self.tokens).expand(count, -1)
        return Batch(inputs, where, symbols)

    @property
    def chance(self) -> float:
        """A guess among the symbols of the sequence."""
        return 1 / self.items

    @property
    def best(self) -> float:
        return 1.0

    def oracle(self, batch: Batch) -> Tensor:
        field = batch.inputs[:, : self.length]
        return field[field < self.symbols].view(len(batch), self.items)

    def capacity(self, rank: int, value_dim: int) -> float:
        return predicted_recall(self.items, rank, value_dim, self.symbols)
