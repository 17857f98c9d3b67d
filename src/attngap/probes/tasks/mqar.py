"""Multi-query associative recall: pairs of key and value, then every key again, asking for its value."""

import dataclasses

import torch
from torch import Tensor

from attngap.probes.tasks.base import Batch, Split, Task, distinct
from attngap.probes.tasks.recall import predicted_recall


@dataclasses.dataclass(frozen=True)
class Mqar(Task):
    """`k1 v1 ... kN vN` and then the keys again at even places drawn from p(x) ~ x^(power - 1), as in Zoology.

    Keys come from the lower half of the vocabulary, values from the upper half. The places between are noise from the
    upper half: in Zoology's vocabulary of 8192 a stray copy of a key is rare, in a small one it would be a wrong pair.
    """

    name = "mqar"
    paper = "2312.04927"
    about = "multi-query associative recall: which value went with this key?"
    metric = "accuracy"

    length: int = 64
    pairs: int = 8
    vocabulary: int = 512  # type: ignore[assignment]
    power: float = 0.01

    def check(self) -> None:
        half = self.vocabulary // 2
        self.need(self.pairs <= half, f"pairs must be at most half the vocabulary, {half}, got {self.pairs}")
        self.need(
            self.length >= 4 * self.pairs,
            f"length must be at least 4 x pairs = {4 * self.pairs}, got {self.length}: pairs, then queries",
        )
        self.need(self.power > 0, f"power must be above 0 (1 is uniform), got {self.power}")

    @property
    def outputs(self) -> int:
        return self.vocabulary

    @property
    def tokens(self) -> int:
        return self.length

    def sample(self, count: int, generator: torch.Generator, split: Split = "train") -> Batch:
        half = self.vocabulary // 2
        keys = distinct(count, 0, half, self.pairs, generator)
        values = distinct(count, half, self.vocabulary, self.pairs, generator)
        inputs = torch.randint(half, self.vocabulary, (count, self.length), generator=generator)
        inputs[:, 0 : 2 * self.pairs : 2] = keys
        inputs[:, 1 : 2 * self.pairs : 2] = values
        places = (self.length - 2 * self.pairs) // 2
        # Without replacement: of exponential clocks with rates p(x), the first to ring.
        clocks = -torch.rand(count, places, generator=generator).log()
        gaps = (clocks * torch.arange(1, places + 1) ** (1 - self.power)).argsort(dim=1)[:, : self.pairs]
        where = 2 * self.pairs + 2 * gaps
        return Batch(inputs.scatter_(1, where, keys), where, values)

    @property
    def chance(self) -> float:
        """A guess among the values in the sequence."""
        return 1 / self.pairs

    @property
    def best(self) -> float:
        return 1.0

    def oracle(self, batch: Batch) -> Tensor:
        asked = batch.inputs.gather(1, batch.where)  # (b, s)
        keys = batch.inputs[:, 0 : 2 * self.pairs : 2]
        found = (asked[:, :, None] == keys[:, None, :]).int().argmax(-1)
        return batch.inputs[:, 1 : 2 * self.pairs : 2].gather(1, found)

    def capacity(self, rank: int, value_dim: int) -> float:
        return predicted_recall(self.pairs, rank, value_dim, self.vocabulary // 2)
