"""The needle: the separation data of the theory, learned instead of constructed."""

import dataclasses
import math

import torch
from torch import Tensor

from attngap.probes.tasks.base import Batch, Split, Task


@dataclasses.dataclass(frozen=True)
class Needle(Task):
    """Rows in the style of the separation construction (arXiv 2310.11685); say which kind of row the needle is.

    n rows of width p + 2, times sqrt(log n): column 1 is `a1` at one random row and uniform in [0, a0] elsewhere; the
    next p columns are b times the identity, repeated; the last is c = 1 - b. Kinds lie in random order. A last row of
    zeros asks for the kind of the needle.

    With exactly zero background any scores find the needle; with a background linear scores must reach a RATIO of about
    n a0 / a1 to put half the weight on it, softmax a logit GAP of the logarithm of that.
    """

    name = "needle"
    paper = "2310.11685"
    about = "which kind is the one row with a large first entry?"
    metric = "accuracy"

    rows: int = 128
    kinds: int = 16
    a1: float = 0.7
    a0: float = 0.1
    b: float = 0.5

    def check(self) -> None:
        self.need(self.kinds >= 2, f"kinds must be at least 2, got {self.kinds}")
        self.need(self.rows % self.kinds == 0, f"kinds must divide rows, got {self.kinds} kinds and {self.rows} rows")
        self.need(0 <= self.a0 < self.a1, f"a0 must be at least 0 and below a1 = {self.a1}, got {self.a0}")
        self.need(0.1 <= self.b <= 0.9, f"b must be between 0.1 and 0.9, got {self.b}")

    @property
    def vocabulary(self) -> None:
        return None

    @property
    def features(self) -> int:
        return self.kinds + 2

    @property
    def outputs(self) -> int:
        return self.kinds

    @property
    def tokens(self) -> int:
        return self.rows + 1

    def sample(self, count: int, generator: torch.Generator, split: Split = "train") -> Batch:
        size = math.sqrt(math.log(self.rows))
        order = torch.rand(count, self.rows, generator=generator).argsort(dim=1) % self.kinds
        needle = torch.randint(self.rows, (count, 1), generator=generator)
        inputs = torch.zeros(count, self.tokens, self.features)
        rows = inputs[:, :-1]
        rows[:, :, 0] = torch.rand(count, self.rows, generator=generator) * self.a0 * size
        rows[:, :, 0].scatter_(1, needle, self.a1 * size)
        rows[:, :, 1:-1].scatter_(2, order[:, :, None], self.b * size)
        rows[:, :, -1] = (1 - self.b) * size
        where = torch.full((count, 1), self.rows)
        return Batch(inputs, where, order.gather(1, needle))

    @property
    def chance(self) -> float:
        return 1 / self.kinds

    @property
    def best(self) -> float:
        return 1.0

    def oracle(self, batch: Batch) -> Tensor:
        needle = batch.inputs[:, :-1, 0].argmax(1)
        return batch.inputs[torch.arange(len(batch)), needle, 1:-1].argmax(-1, keepdim=True)
