"""Single-location regression: one token of the sequence decides, and says so along a hidden direction."""

import dataclasses
import functools
import math

import torch
from torch import Tensor

from attngap.probes.tasks.base import Batch, Regression, Split, stream


@dataclasses.dataclass(frozen=True)
class SingleLocation(Regression):
    """Tokens are N(0, I_d) but one, at J, is shifted by `signal` sqrt(d/2) along k*; y = v*.x_J + noise, v* _|_ k*.

    The best answer weighs every token by its probability to be J, a softmax of signal sqrt(d/2) k*.x, and averages
    v*.x under it: softmax attention attains the Bayes risk, linear attention does not (Marion et al. 2410.01537;
    2509.21936). A last row asks: it holds k*.

    With `directions` 1 both k* and v* are hidden and fixed, as published. One positive feature of the key that grows
    like an exponential, such as elu's, is then enough. With more, each sequence draws its k* from that many unit
    vectors orthogonal to v*, so the weights depend on the query and a few features no longer hold them.
    """

    name = "single-location"
    paper = "2410.01537"
    about = "one token decides the answer; error against the Bayes risk"
    solved_at = 0.9

    dim: int = 16
    length: int = 64
    signal: float = 1.5
    noise: float = 0.1
    directions: int = 1

    def check(self) -> None:
        self.need(self.dim >= 2, f"dim must be at least 2, got {self.dim}")
        self.need(self.signal > 0, f"signal must be above 0, got {self.signal}")
        self.need(self.directions >= 1, f"directions must be at least 1, got {self.directions}")
        self.need(self.noise >= 0, f"noise must be at least 0, got {self.noise}")

    @property
    def features(self) -> int:
        return self.dim

    @property
    def tokens(self) -> int:
        return self.length + 1

    @property
    def shift(self) -> float:
        return self.signal * math.sqrt(self.dim / 2)

    def sample(self, count: int, generator: torch.Generator, split: Split = "train") -> Batch:
        directions, v = _directions(self.dim, self.directions)
        inputs = torch.empty(count, self.tokens, self.dim).normal_(generator=generator)
        inputs[:, -1] = directions[torch.randint(self.directions, (count,), generator=generator)]
        place = torch.randint(self.length, (count,), generator=generator)
        rows = torch.arange(count)
        inputs[rows, place] += self.shift * inputs[:, -1]
        targets = inputs[rows, place] @ v + self.noise * torch.randn(count, generator=generator)
        return Batch(inputs, torch.full((count, 1), self.length), targets[:, None])

    @property
    def variance(self) -> float:
        return 1 + self.noise**2

    @property
    def best(self) -> float:
        return _bayes_risk(self)

    def posterior(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Mean and variance of v*.x_J given the tokens, (b, 1) each."""
        _, v = _directions(self.dim, self.directions)
        rows, k = batch.inputs[:, :-1], batch.inputs[:, -1, :, None]
        weights = torch.softmax(self.shift * (rows @ k).squeeze(-1), dim=1)
        mean = (weights * (rows @ v)).sum(1, keepdim=True)
        return mean, (weights * (rows @ v - mean).square()).sum(1, keepdim=True)

    def oracle(self, batch: Batch) -> Tensor:
        return self.posterior(batch)[0]


@functools.cache
def _directions(dim: int, count: int) -> tuple[Tensor, Tensor]:
    """Unit vectors orthogonal to v*, (count, dim), and v* itself."""
    turn, _ = torch.linalg.qr(torch.randn(dim, dim, generator=stream("directions", dim)))
    among = torch.randn(count, dim - 1, generator=stream("directions", dim, count))
    return torch.nn.functional.normalize(among, dim=1) @ turn[:, 1:].T, turn[:, 0]


@functools.cache
def _bayes_risk(task: SingleLocation) -> float:
    """The mean posterior variance over 20,000 sequences: good to about one percent."""
    _, variance = task.posterior(task.sample(20_000, stream("best", 0)))
    return (variance.double().mean().item() + task.noise**2) / task.variance
