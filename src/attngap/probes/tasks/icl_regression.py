"""In-context linear regression: examples of a hidden linear map, then its value at the next point."""

import dataclasses
import functools

import torch
from torch import Tensor

from attngap.probes.tasks.base import Batch, Regression, Split, stream


@dataclasses.dataclass(frozen=True)
class IclRegression(Regression):
    """`x1 y1 x2 y2 ...` with y = w.x + noise, w ~ N(0, I/d), x ~ N(0, I); y_i is asked for at x_i.

    The best answer is ridge regression on the pairs before it with penalty d noise^2: the posterior mean. Its error is
    averaged over all places, the first ones included, where nothing can be known yet.
    """

    name = "icl-regression"
    paper = "2208.01066"
    about = "fit a linear map in context; error against ridge"
    solved_at = 0.9

    dim: int = 4
    points: int = 24
    noise: float = 0.1

    def check(self) -> None:
        self.need(self.noise > 0, f"noise must be above 0, got {self.noise}")

    @property
    def features(self) -> int:
        return self.dim + 1

    @property
    def tokens(self) -> int:
        return 2 * self.points

    def sample(self, count: int, generator: torch.Generator, split: Split = "train") -> Batch:
        w = torch.randn(count, self.dim, 1, generator=generator) / self.dim**0.5
        x = torch.randn(count, self.points, self.dim, generator=generator)
        y = (x @ w).squeeze(-1) + self.noise * torch.randn(count, self.points, generator=generator)
        inputs = torch.zeros(count, self.tokens, self.features)
        inputs[:, 0::2, :-1] = x
        inputs[:, 1::2, -1] = y
        where = torch.arange(0, self.tokens, 2).expand(count, -1)
        return Batch(inputs, where, y)

    @property
    def variance(self) -> float:
        return 1 + self.noise**2

    @property
    def best(self) -> float:
        return _ridge_error(self)

    def oracle(self, batch: Batch) -> Tensor:
        x = batch.inputs[:, 0::2, :-1].double()
        y = batch.inputs[:, 1::2, -1].double()
        gram = (x[..., :, None] * x[..., None, :]).cumsum(1) - x[..., :, None] * x[..., None, :]  # pairs before it
        moment = (x * y[..., None]).cumsum(1) - x * y[..., None]
        penalty = self.dim * self.noise**2 * torch.eye(self.dim, dtype=torch.float64)
        w = torch.linalg.solve(gram + penalty, moment)
        return (x * w).sum(-1).float()


@functools.cache
def _ridge_error(task: IclRegression) -> float:
    """By simulation: 20,000 sequences, so good to about half a percent."""
    batch = task.sample(20_000, stream("best", 0))
    return task.score(task.oracle(batch), batch)
