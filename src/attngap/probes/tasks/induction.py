"""Induction: a token seen before comes again; predict what followed it."""

import dataclasses

import torch
from torch import Tensor

from attngap.probes.tasks.base import Batch, Split, Task, distinct
from attngap.probes.tasks.recall import predicted_recall


@dataclasses.dataclass(frozen=True)
class Induction(Task):
    """A passage of distinct random tokens, then bigrams of it in random order, asked for at their first token.

    Unlike mqar every token is both key and value, so that the model cannot tell them apart by their names (Olsson et
    al., with the repeat shuffled so that it cannot be solved by position).
    """

    name = "induction"
    paper = "2209.11895"
    about = "what followed this token the first time?"
    metric = "accuracy"

    passage: int = 24
    queries: int = 12
    vocabulary: int = 128  # type: ignore[assignment]

    def check(self) -> None:
        self.need(self.passage >= 2, f"passage must be at least 2 tokens, got {self.passage}")
        self.need(
            self.passage <= self.vocabulary,
            f"passage must be at most vocabulary, {self.vocabulary}, got {self.passage}",
        )
        self.need(self.queries < self.passage, f"queries must be below passage, {self.passage}, got {self.queries}")

    @property
    def outputs(self) -> int:
        return self.vocabulary

    @property
    def tokens(self) -> int:
        return self.passage + 2 * self.queries

    def sample(self, count: int, generator: torch.Generator, split: Split = "train") -> Batch:
        passage = distinct(count, 0, self.vocabulary, self.passage, generator)
        picks = distinct(count, 0, self.passage - 1, self.queries, generator)
        first, second = passage.gather(1, picks), passage.gather(1, picks + 1)
        inputs = torch.cat([passage, torch.stack([first, second], dim=2).flatten(1)], dim=1)
        where = torch.arange(self.passage, self.tokens, 2).expand(count, -1)
        return Batch(inputs, where, second)

    @property
    def chance(self) -> float:
        """A guess among the tokens of the passage that follow another one."""
        return 1 / (self.passage - 1)

    @property
    def best(self) -> float:
        return 1.0

    def oracle(self, batch: Batch) -> Tensor:
        passage = batch.inputs[:, : self.passage]
        asked = batch.inputs.gather(1, batch.where)
        found = (asked[:, :, None] == passage[:, None, :]).int().argmax(-1)
        return passage.gather(1, found + 1)

    def capacity(self, rank: int, value_dim: int) -> float:
        return predicted_recall(self.passage, rank, value_dim, self.vocabulary)
