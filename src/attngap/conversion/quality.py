"""How good a model still is: perplexity and divergence on text, and recall, which perplexity hardly shows."""

import math
from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Int
from pydantic import BaseModel, ConfigDict
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from attngap.conversion.beginnings import guessed
from attngap.conversion.calibration import seed_for
from attngap.conversion.joint import divergence
from attngap.heads.forward import outputs
from attngap.heads.passages import passages, special_tokens, stress
from attngap.models.placement import device_of

DEPTHS = (0.1, 0.5, 0.9)
DIGITS = 5
SCORED = 512  # last tokens of a passage that count, at most
NUMBERS = 3  # hidden at a place per trial, where passages are cheap to read: one digit of five is a fifth of a number
CHEAP = 2048  # tokens of such a passage, at most
SEQUENCES = 2  # of repeated random tokens per trial: half a thousand predictions alone are off by two points


class Quality(BaseModel):
    """One model's figures. An encoder has no perplexity: its divergence is the relative squared error of its states."""

    model_config = ConfigDict(extra="forbid")
    perplexity: float | None = None
    perplexity_ratio: float | None = None  # to the original's
    divergence: float = 0.0  # KL to the original, nats per token; of an encoder see above
    induction: float | None = None  # share of a repeated random sequence predicted
    needle: float | None = None  # share of the digits of a hidden number recalled
    needle_by_place: dict[str, float] = {}  # "length@depth"


STATES = "error of states"  # what a table calls an encoder's divergence


def is_of_states(quality: Mapping[str, Quality]) -> bool:
    """Of an encoder, which predicts nothing?"""
    return all(each.perplexity is None for each in quality.values())


@torch.no_grad()
def on_text(
    models: Mapping[str, PreTrainedModel], tokens: Int[Tensor, "count context"], *, is_language_model: bool
) -> dict[str, Quality]:
    """Perplexity and divergence of each model; the first is the original."""
    names = list(models)
    loss, apart = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)
    for passage in tokens[:, None]:
        teacher: Tensor | None = None
        for name, model in models.items():
            out = outputs(model, passage)
            if teacher is None:
                teacher = out
            else:
                apart[name] += float(divergence(out, teacher, is_language_model=is_language_model)) / len(tokens)
            if is_language_model:
                loss[name] += float(F.cross_entropy(out[0, :-1].float(), passage[0, 1:].to(out.device))) / len(tokens)
    if not is_language_model:
        return {name: Quality(divergence=apart[name]) for name in names}
    return {
        name: Quality(
            perplexity=math.exp(loss[name]),
            perplexity_ratio=math.exp(loss[name] - loss[names[0]]),
            divergence=apart[name],
        )
        for name in names
    }


@torch.no_grad()
def perplexity(model: PreTrainedModel, tokens: Int[Tensor, "count context"]) -> float:
    """Of the last tokens of all passages together, half of them at most: there replacements show."""
    last = min(SCORED, tokens.shape[1] // 2)
    losses = [
        F.cross_entropy(outputs(model, row, last + 1)[0, :-1].float(), row[0, -last:].to(device_of(model)))
        for row in tokens[:, None]
    ]
    return math.exp(float(torch.stack(losses).mean()))


@torch.no_grad()
def induction(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, context: int, trials: int, seed: int
) -> float:
    """Share of the second half of a repeated random sequence that is predicted."""
    right = total = 0
    for trial in range(trials):
        drawn = seed_for(seed, "receipt induction", trial)
        tokens, period = stress(tokenizer, context=context, seed=drawn, period=context // 2 - 1)
        right += int(guessed(model, [(tokens, period)])[0].sum())
        total += period
    return right / total


@torch.no_grad()
def needle(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str | list[str] | None,
    *,
    lengths: Sequence[int],
    trials: int,
    seed: int,
) -> dict[str, float]:
    """Share of a hidden number's digits recalled, by length and depth; each digit is given once it was guessed."""
    found = {}
    for length in lengths:
        hay = passages(tokenizer, text, context=length, count=trials, seed=seed, split="heldout")
        numbers = trials * (NUMBERS if length <= CHEAP else 1)
        seeds = [seed_for(seed, "receipt needle", number) for number in range(numbers)]
        asked = [
            hide(tokenizer, hay[i % trials], depth, seed=drawn) for depth in DEPTHS for i, drawn in enumerate(seeds)
        ]
        hits = [float(each.float().mean()) for each in guessed(model, asked)]
        for place, depth in enumerate(DEPTHS):
            found[f"{length}@{depth:.1f}"] = sum(hits[place * numbers : (place + 1) * numbers]) / numbers
    return found


def hide(
    tokenizer: PreTrainedTokenizerBase, hay: Int[Tensor, " length"], depth: float, *, seed: int
) -> tuple[Int[Tensor, "1 t"], int]:
    """Tokens that state a number at `depth` and end by repeating it; how many of the last tokens are the number."""
    digits = torch.randint(10, (DIGITS,), generator=torch.Generator().manual_seed(seed)).tolist()
    number = tokenizer("".join(map(str, digits)), add_special_tokens=False).input_ids
    state = tokenizer("\n\nRemember: the secret number is", add_special_tokens=False).input_ids
    ask = tokenizer("\n\nQuestion: what is the secret number? The secret number is", add_special_tokens=False).input_ids
    space = tokenizer(" ", add_special_tokens=False).input_ids
    dot = tokenizer(".\n\n", add_special_tokens=False).input_ids
    inserted = [*state, *space, *number, *dot]
    asked = [*ask, *space, *number]
    prefix, _ = special_tokens(tokenizer)
    body = hay.tolist()[len(prefix) : len(hay) - len(inserted) - len(asked)]
    cut = int(len(body) * depth)
    whole = [*prefix, *body[:cut], *inserted, *body[cut:], *asked]
    return torch.tensor([whole]), len(number)


def recall(
    models: Mapping[str, PreTrainedModel],
    tokenizer: PreTrainedTokenizerBase,
    text: str | list[str] | None,
    found: dict[str, Quality],
    *,
    context: int,
    lengths: Sequence[int],
    trials: int,
    seed: int,
) -> None:
    """Add induction and needle figures to each model's quality."""
    for name, model in models.items():
        quality = found[name]
        quality.induction = induction(model, tokenizer, context=context, trials=SEQUENCES * trials, seed=seed)
        quality.needle_by_place = needle(model, tokenizer, text, lengths=lengths, trials=trials, seed=seed)
        quality.needle = sum(quality.needle_by_place.values()) / len(quality.needle_by_place)
