"""Fuzzy recall: keys and values of several tokens each, so that no single token names a key."""

import dataclasses

import torch
from torch import Tensor

from attngap.probes.tasks.base import Batch, Split, Task, distinct


@dataclasses.dataclass(frozen=True)
class FuzzyRecall(Task):
    """Pairs of a key (`key_tokens` tokens) and a value (`value_tokens` tokens), then all pairs again in another order.

    Key tokens come from a small alphabet and recur in many keys. As in MAD, but with fixed lengths, so that where a key
    ends is never in doubt and an oracle is always right.
    """

    name = "fuzzy-recall"
    paper = "2403.17844"
    about = "recall with keys and values of several tokens"
    metric = "accuracy"

    pairs: int = 8
    key_tokens: int = 2
    value_tokens: int = 2
    key_symbols: int = 8
    value_symbols: int = 32

    def check(self) -> None:
        keys = self.key_symbols**self.key_tokens
        self.need(
            self.pairs <= keys,
            f"pairs must be at most key_symbols ** key_tokens = {keys} distinct keys, got {self.pairs}",
        )

    @property
    def vocabulary(self) -> int:
        return self.key_symbols + self.value_symbols

    @property
    def outputs(self) -> int:
        return self.vocabulary

    @property
    def tokens(self) -> int:
        return 2 * self.pairs * (self.key_tokens + self.value_tokens)

    def sample(self, count: int, generator: torch.Generator, split: Split = "train") -> Batch:
        codes = distinct(count, 0, self.key_symbols**self.key_tokens, self.pairs, generator)
        digits = self.key_symbols ** torch.arange(self.key_tokens)
        keys = codes[:, :, None] // digits % self.key_symbols
        shape = (count, self.pairs, self.value_tokens)
        values = torch.randint(self.key_symbols, self.vocabulary, shape, generator=generator)
        pairs = torch.cat([keys, values], dim=2)  # (b, pairs, key + value)
        order = distinct(count, 0, self.pairs, self.pairs, generator)
        again = pairs.gather(1, order[:, :, None].expand_as(pairs))
        inputs = torch.cat([pairs.flatten(1), again.flatten(1)], dim=1)
        where = self._asked().expand(count, -1)
        return Batch(inputs, where, inputs.gather(1, where + 1))

    def _asked(self) -> Tensor:
        """Places from which the tokens of the second values are predicted."""
        width = self.key_tokens + self.value_tokens
        starts = (self.pairs + torch.arange(self.pairs)) * width + self.key_tokens - 1
        return (starts[:, None] + torch.arange(self.value_tokens)).flatten()

    @property
    def chance(self) -> float:
        return 1 / self.value_symbols

    @property
    def best(self) -> float:
        return 1.0

    def oracle(self, batch: Batch) -> Tensor:
        width = self.key_tokens + self.value_tokens
        first, again = batch.inputs.view(len(batch), 2, self.pairs, width).unbind(1)
        same = (again[:, :, None, : self.key_tokens] == first[:, None, :, : self.key_tokens]).all(-1)  # (b, p, p)
        values = first[:, :, self.key_tokens :]
        found = same.int().argmax(-1)[:, :, None].expand(-1, -1, self.value_tokens)
        return values.gather(1, found).flatten(1)
