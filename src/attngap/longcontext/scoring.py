"""Ask a model the questions of an example, and say how sure a score is."""

import copy
import dataclasses
import math

import torch
from jaxtyping import Bool
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from attngap.longcontext.writing import Example, Question
from attngap.models.placement import device_of

Z = 1.96  # standard deviations of a 95% interval


@dataclasses.dataclass(frozen=True)
class Interval:
    """A 95% interval of a share."""

    low: float
    high: float


@torch.no_grad()
def answer(model: PreTrainedModel, example: Example) -> list[float]:
    """The share of each answer's tokens that the model predicts, every token given once it was guessed.

    The context is read once and before any question, so that whatever compresses it does not know what will be asked.
    """
    cache = DynamicCache(config=model.config)
    model(example.context.to(device_of(model)), past_key_values=cache, use_cache=True, logits_to_keep=1)
    return [float(_guessed(model, question, copy.deepcopy(cache)).float().mean()) for question in example.questions]


@torch.no_grad()
def answer_blind(model: PreTrainedModel, example: Example) -> list[float]:
    """The same without the context: what guessing comes to."""
    return [float(_guessed(model, question, None).float().mean()) for question in example.questions]


def _guessed(model: PreTrainedModel, question: Question, cache: DynamicCache | None) -> Bool[Tensor, " answer"]:
    tokens = torch.tensor([[*question.ask, *question.answer]], device=device_of(model))
    count = len(question.answer)
    logits = model(tokens, past_key_values=cache, use_cache=cache is not None, logits_to_keep=count + 1).logits
    return logits[0, -count - 1 : -1].argmax(-1) == tokens[0, -count:]


def wilson(share: float, count: int) -> Interval:
    """Wilson's interval for a share over `count` independent examples.

    Meant for examples that are right or wrong. Shares of an answer vary less than that, so it is rather too wide.
    """
    middle = (share + Z**2 / (2 * count)) / (1 + Z**2 / count)
    reach = Z * math.sqrt(share * (1 - share) / count + Z**2 / (4 * count**2)) / (1 + Z**2 / count)
    return Interval(max(0.0, middle - reach), min(1.0, middle + reach))


def difference(a: float, b: float, count: int) -> Interval:
    """Newcombe's interval for a - b from Wilson's of each; both were asked the same, which makes it rather too wide."""
    first, second = wilson(a, count), wilson(b, count)
    low = a - b - math.hypot(a - first.low, second.high - b)
    high = a - b + math.hypot(first.high - a, b - second.low)
    return Interval(low, high)
