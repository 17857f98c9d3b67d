"""What a converted model would lose, from a few joint replacements: the plan's figures and their intervals.

Divergence is a power law of the summed damage of the heads that are replaced, its exponent learned: errors of many
heads interact. Passages differ in level. The logarithm of the perplexity ratio has the divergence as its mean where the
model is right as often as it says, and scatters from token to token. Of a repeated sequence exp(-(c divergence)^p)
is kept.
"""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict
from scipy import optimize, stats

from attngap.models.plan import Expected

LEVEL = 0.9  # of the intervals
LEAST = 4  # joint replacements that a law is fitted to
# Of an exponent of one, without interaction, in units of squared log-damage: it decides only where shares are alike.
PRIOR = 0.5


class Joint(BaseModel):
    """Many heads replaced at once, on one passage that no score has seen."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="null")

    kind: Literal["text", "recall"]
    passage: int
    kept: int  # replaceable heads that kept softmax
    damage: float  # of those replaced, single heads added up
    divergence: float  # nats per token
    log_ratio: float  # of perplexities
    deviation: float  # of that from token to token
    original: float | None = None  # share of the repeated sequence that the original predicts
    recalled: float | None = None  # and with these heads replaced


class PowerLaw:
    """divergence = exp(level) * damage ** exponent on average over passages, each of which has a level of its own."""

    def __init__(self, rows: Sequence[Joint]):
        x, y = (np.log([getattr(row, name) for row in rows]) for name in ("damage", "divergence"))
        passage = np.unique([row.passage for row in rows], return_inverse=True)[1]
        count = np.bincount(passage)
        dx, dy = (each - (np.bincount(passage, each) / count)[passage] for each in (x, y))
        self.exponent = float((dx @ dy + PRIOR) / (dx @ dx + PRIOR))
        levels = np.bincount(passage, y - self.exponent * x) / count
        self.level = float(np.log(np.exp(levels).mean()))
        within = y - self.exponent * x - levels[passage]
        self.points, self.passages = len(rows), len(count)
        self.noise = float(within @ within / max(1, len(rows) - len(count) - 1))
        self.between = float(levels.var(ddof=1)) if len(count) > 1 else 0.0
        self.quantile = float(stats.t.ppf((1 + LEVEL) / 2, len(rows) - 2))

    def __call__(self, damage: float) -> float:
        return math.exp(self.level) * damage**self.exponent if damage > 0 else 0.0

    def half_interval(self, passages: int) -> float:
        """Half the interval of the logarithm of a mean over that many other passages."""
        variance = self.noise * (1 + 1 / self.points) + self.between * (1 / self.passages + 1 / passages)
        return self.quantile * math.sqrt(variance)


class Predictor:
    """Perplexity ratio and recall after replacing heads, by the sums of their damage on text and on recall.

    Intervals are for a mean over `passages` other passages of `context` tokens.
    """

    def __init__(self, joint: Sequence[Joint], context: int, passages: int):
        self.tokens, self.passages = context * passages, passages
        text, recall = (_usable(joint, kind) for kind in ("text", "recall"))
        self.text = PowerLaw(text) if len(text) >= LEAST else None
        self.scatter = float(np.mean([row.deviation**2 / row.divergence for row in text])) if text else 0.0
        recall = [row for row in recall if row.original]
        self.recall = PowerLaw(recall) if len(recall) >= LEAST else None
        self.decay, self.error = _decay(recall) if self.recall else ((0.0, 1.0), 0.0)

    def __call__(self, text: float, recall: float) -> dict[str, Expected | None]:
        """Fields of a plan's point."""
        return {"perplexity_ratio": self.perplexity_ratio(text), "recalled": self.recalled(recall)}

    def perplexity_ratio(self, damage: float) -> Expected | None:
        if self.text is None:
            return None
        mean, half = self.text(damage), self.text.half_interval(self.passages)
        sampling = self.text.quantile * math.sqrt(self.scatter * mean / self.tokens)
        low = mean - math.hypot(mean - mean * math.exp(-half), sampling)
        high = mean + math.hypot(mean * math.exp(half) - mean, sampling)
        return Expected(value=math.exp(mean), low=math.exp(low), high=math.exp(high))

    def recalled(self, damage: float) -> Expected | None:
        """As a share of what the original predicts; above 1 the replaced model predicts more."""
        if self.recall is None:
            return None
        mean, half = self.recall(damage), self.recall.half_interval(self.passages)
        value, worse, better = (_kept(self.decay, mean * math.exp(each)) for each in (0.0, half, -half))
        error = self.recall.quantile * self.error if mean else 0.0
        low = max(0.0, value - math.hypot(value - worse, error))
        return Expected(value=value, low=low, high=value + math.hypot(better - value, error))


def _usable(joint: Sequence[Joint], kind: str) -> list[Joint]:
    return [row for row in joint if row.kind == kind and row.damage > 0 and row.divergence > 0]


def _kept(decay: tuple[float, float], divergence: float) -> float:
    """Share of a repeated sequence that is still predicted: a little divergence costs nothing, much of it all."""
    rate, power = decay
    return math.exp(-((rate * divergence) ** power))


def _decay(rows: Sequence[Joint]) -> tuple[tuple[float, float], float]:
    """Rate and power of `_kept`, by least squares, and the error that a single passage is left with."""
    divergence = [row.divergence for row in rows]
    kept = np.array([(row.recalled or 0.0) / (row.original or 1.0) for row in rows])

    def misfit(decay: np.ndarray) -> np.ndarray:
        return kept - [_kept((math.exp(decay[0]), decay[1]), each) for each in divergence]

    found = optimize.least_squares(misfit, (0.0, 1.0), bounds=((-7.0, 0.7), (7.0, 2.0)))
    rate, power = found.x
    return (math.exp(rate), float(power)), math.sqrt(2 * found.cost / max(1, len(rows) - 2))
