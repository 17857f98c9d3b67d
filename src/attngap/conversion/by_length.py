"""Quality at each length: perplexity and divergence of the last tokens of text, and numbers recalled from all over it.

One passage serves all of it: held-out text in which numbers are stated, evenly spread, and asked for at the end.
Another is a random sequence repeated with a period of half the length.
"""

import math
from collections.abc import Mapping

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from attngap.conversion.calibration import FactsPassage, seed_for
from attngap.conversion.joint import divergence
from attngap.conversion.quality import SCORED
from attngap.heads.forward import outputs
from attngap.heads.passages import passages, special_tokens, stress


class AtLength(BaseModel):
    """One model at one length; None is not measured."""

    model_config = ConfigDict(extra="forbid")
    length: int
    part: str
    perplexity: float | None = None
    perplexity_ratio: float | None = None  # to the original's at the same length
    divergence: float | None = None  # KL to the original, nats a token
    needle: float | None = None  # share of the digits recalled
    needle_by_depth: list[float] = []  # from the nearest fact to the farthest
    repetition: float | None = None  # share predicted of the last tokens of a sequence that comes a second time


@torch.no_grad()
def at_length(
    models: Mapping[str, PreTrainedModel],
    tokenizer: PreTrainedTokenizerBase,
    text: str | list[str] | None,
    length: int,
    *,
    seed: int = 0,
    repetition: bool = False,
) -> list[AtLength]:
    """Every model on one held-out passage of this length; the first is the original."""
    drawn = seed_for(seed, "receipt facts")
    hay = passages(tokenizer, text, context=length, count=1, seed=drawn, split="heldout")
    passage = FactsPassage.make(tokenizer, hay, seed=drawn)
    tokens, last = passage.tokens[0], min(SCORED, length // 2) + passage.asked
    first = length - last  # the token whose logits come first
    teacher: Tensor | None = None
    found: list[AtLength] = []
    for part, model in models.items():
        out = outputs(model, passage.tokens, last)[0].float()
        teacher = out if teacher is None else teacher
        text_rows = slice(0, last - passage.asked - 1)
        tokens = tokens.to(out.device)
        loss = float(F.cross_entropy(out[text_rows], tokens[first + 1 : length - passage.asked]))
        right = [
            float((out[[i - 1 - first for i in places]].argmax(-1) == tokens[list(places)]).float().mean())
            for places in passage.answers
        ]
        apart = divergence(out[None, text_rows], teacher[None, text_rows], is_language_model=True)
        found.append(
            AtLength(
                length=length,
                part=part,
                perplexity=math.exp(loss),
                perplexity_ratio=1.0 if not found else math.exp(loss) / (found[0].perplexity or 1.0),
                divergence=float(apart) if found else 0.0,
                needle=sum(right) / len(right),
                needle_by_depth=right,
            )
        )
        if repetition:
            found[-1].repetition = repeated(model, tokenizer, length // 2 - 1, seed=seed)
    return found


@torch.no_grad()
def repeated(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, period: int, *, seed: int) -> float:
    """Share predicted of the last tokens of a random sequence of `period` tokens that comes a second time."""
    twice, period = stress(tokenizer, context=2 * period + 2, seed=seed_for(seed, "receipt repeated"), period=period)
    _, suffix = special_tokens(tokenizer)
    tokens = twice[:, : twice.shape[1] - len(suffix)]
    last = min(SCORED, period)
    guessed = outputs(model, tokens, last + 1)[0, :-1].argmax(-1)
    return float((guessed == tokens[0, -last:]).float().mean())
