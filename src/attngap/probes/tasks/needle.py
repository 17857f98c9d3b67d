"""The needle: the separation data of the theory, learned instead of constructed."""

import dataclasses
import math

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from attngap.probes.tasks.base import Batch, Split, Task, distinct, stream


@dataclasses.dataclass(frozen=True)
class Needle(Task):
    """Rows in the style of the separation construction (arXiv 2310.11685); say which kind of row the needle is.

    n rows of width e + p + 1, times sqrt(log n): the first e = `columns` columns are `a1` times a direction at each
    needle, and up to `a0` times one elsewhere; the next p = `kinds` columns are b times the identity, repeated; the
    last is c = 1 - b. Kinds lie in random order, those of the needles differ. After the rows come the directions of the
    needles, each asking for the kind of its needle.

    One needle in one column is the construction itself. Trained weights find that one with any scores: signed ones
    subtract the background, and elu's exponential side is softmax's kernel for one direction. With many directions in
    few columns the background is no longer known beforehand, since other needles are part of it.
    """

    name = "needle"
    paper = "2310.11685"
    about = "which kind is the one row with a large entry in this direction?"
    metric = "accuracy"

    rows: int = 64
    kinds: int = 16
    columns: int = 1
    directions: int = 1
    needles: int = 1
    a1: float = 0.7
    a0: float = 0.1
    b: float = 0.5

    def check(self) -> None:
        self.need(self.kinds >= 2, f"kinds must be at least 2, got {self.kinds}")
        self.need(self.rows % self.kinds == 0, f"kinds must divide rows, got {self.kinds} kinds and {self.rows} rows")
        for label in ("kinds", "directions"):
            most = getattr(self, label)
            self.need(self.needles <= most, f"needles must be at most {label} = {most}, got {self.needles}")
        self.need(
            self.columns > 1 or self.directions == 1,
            f"directions must be 1 where columns is 1, got {self.directions}",
        )
        self.need(0 <= self.a0 < self.a1, f"a0 must be at least 0 and below a1 = {self.a1}, got {self.a0}")
        self.need(0.1 <= self.b <= 0.9, f"b must be between 0.1 and 0.9, got {self.b}")

    @property
    def vocabulary(self) -> None:
        return None

    @property
    def features(self) -> int:
        return self.columns + self.kinds + 1

    @property
    def outputs(self) -> int:
        return self.kinds

    @property
    def tokens(self) -> int:
        return self.rows + self.needles

    @property
    def codebook(self) -> Float[Tensor, "directions columns"]:
        """The unit vectors, the same for every sequence and seed."""
        if self.columns == 1:
            return torch.ones(1, 1)
        drawn = torch.randn(self.directions, self.columns, generator=stream("needle", self.columns, self.directions))
        return F.normalize(drawn, dim=-1)

    def sample(self, count: int, generator: torch.Generator, split: Split = "train") -> Batch:
        n, e = self.rows, self.columns
        size, codebook = math.sqrt(math.log(n)), self.codebook
        place = torch.rand(count, n, generator=generator).argsort(dim=1)  # of copy c of kind i: entry i + c kinds
        kind = distinct(count, 0, self.kinds, self.needles, generator)
        copy = torch.randint(n // self.kinds, kind.shape, generator=generator)
        needle = place.gather(1, kind + self.kinds * copy)
        asked = codebook[distinct(count, 0, self.directions, self.needles, generator)]  # (count, needles, e)
        ground = codebook[torch.randint(self.directions, (count, n), generator=generator)]
        ground = ground * torch.rand(count, n, 1, generator=generator) * self.a0

        inputs = torch.zeros(count, self.tokens, self.features)
        rows, questions = inputs[:, :n], inputs[:, n:]
        rows[:, :, :e] = ground.scatter(1, needle[:, :, None].expand(-1, -1, e), self.a1 * asked)
        rows[:, :, e:-1].scatter_(2, (place.argsort(dim=1) % self.kinds)[:, :, None], self.b)
        rows[:, :, -1] = 1 - self.b
        questions[:, :, :e] = asked
        where = torch.arange(n, self.tokens).expand(count, -1)
        return Batch(inputs * size, where, kind)

    @property
    def chance(self) -> float:
        """A guess among the kinds of the needles; for one needle, among all."""
        return 1 / (self.kinds if self.needles == 1 else self.needles)

    @property
    def best(self) -> float:
        return 1.0

    def oracle(self, batch: Batch) -> Tensor:
        n, e = self.rows, self.columns
        rows, questions = batch.inputs[:, :n], batch.inputs[:, n:, :e]
        needle = (questions @ rows[:, :, :e].mT).argmax(-1)  # (b, needles)
        return rows[:, :, e:-1].argmax(-1).gather(1, needle)
