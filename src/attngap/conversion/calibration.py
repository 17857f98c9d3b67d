"""What a conversion is fitted to: passages of text, text the model writes itself, and repeated random tokens.

A model's own samples are text of every kind it knows, so features fitted to them hold on text unlike the calibration
files; repeated tokens are what its recall heads are for.
"""

import dataclasses
import inspect

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from attngap.errors import AttngapError
from attngap.heads.damage import draw_labels
from attngap.heads.passages import Split, passages, stress

SAMPLE_LENGTH = 256  # at most, of one text the model writes: a step costs much the same for more of them
FACTS, DIGITS = 8, 5
THINGS = (
    "harbor",
    "garden",
    "window",
    "engine",
    "river",
    "castle",
    "ticket",
    "market",
    "violin",
    "tunnel",
    "planet",
    "ladder",
)
SAMPLED, REPEATED = 0.2, 0.3  # shares of the passages; the rest is text


@dataclasses.dataclass(frozen=True)
class Shares:
    """How many passages of each kind; `heldout` more of each kind judge the fit and are never trained on."""

    text: int
    sampled: int
    repeated: int

    @classmethod
    def of(cls, count: int, *, generative: bool) -> "Shares":
        if count < 2:
            raise AttngapError(f"Calibration needs at least 2 passages, got {count}. Raise tokens or lower context")
        if not generative:
            return cls(count, 0, 0)
        sampled, repeated = int(count * SAMPLED), int(count * REPEATED)
        return cls(count - sampled - repeated, sampled, repeated)


def calibration(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str | list[str] | None,
    shares: Shares,
    *,
    context: int,
    window: int,
    seed: int,
) -> Int[Tensor, "count context"]:
    """All passages, kinds interleaved; the last are one of each kind, for those judge the fit."""
    kinds = [passages(tokenizer, text, context=context, count=shares.text, seed=seed)]
    if shares.sampled:
        kinds.append(samples(model, tokenizer, context=context, count=shares.sampled, seed=seed))
    if shares.repeated:
        each = [repeats(tokenizer, context=context, beyond=window, seed=seed + i) for i in range(shares.repeated)]
        kinds.append(torch.cat(each))
    trained = [kind[:-1] for kind in kinds]
    place = torch.cat([(torch.arange(len(kind)) + 0.5) / len(kind) for kind in trained])
    return torch.cat([torch.cat(trained)[place.argsort(stable=True)], *(kind[-1:] for kind in reversed(kinds))])


def repeats(tokenizer: PreTrainedTokenizerBase, *, context: int, beyond: int, seed: int) -> Int[Tensor, "1 context"]:
    """Random tokens repeated until the passage is full; the period differs from seed to seed.

    It is longer than `beyond`, where the context allows: what a window still holds needs no recall.
    """
    most = context // 2
    least = min(max(beyond + 2, context // 4), most)
    period = int(torch.randint(least, most + 1, (), generator=torch.Generator().manual_seed(seed)))
    once, _ = stress(tokenizer, context=2 * period, seed=seed + 1000, period=period)
    return once.repeat(1, 3)[:, :context]


def period_of(tokens: Int[Tensor, "1 t"]) -> int:
    """After how many tokens a repeated passage begins anew."""
    return int((tokens[0, 1:] == tokens[0, 0]).nonzero()[0]) + 1


def with_facts(
    tokenizer: PreTrainedTokenizerBase,
    text: str | list[str] | None,
    *,
    context: int,
    seed: int,
    split: Split = "calibration",
) -> Int[Tensor, "1 context"]:
    """A passage of text in which numbers are stated, evenly spread, and asked for at its end."""
    return FactsPassage.make(tokenizer, text, context=context, seed=seed, split=split).tokens


@dataclasses.dataclass(frozen=True, eq=False)
class FactsPassage:
    """Text, then questions; `answers` are the places of each number's digits in the questions, nearest fact first."""

    tokens: Int[Tensor, "1 context"]
    asked: int  # tokens of questions, the last ones
    answers: tuple[range, ...]

    @classmethod
    def make(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        text: str | list[str] | None,
        *,
        context: int,
        seed: int,
        split: Split = "calibration",
    ) -> "FactsPassage":
        generator = torch.Generator().manual_seed(seed)
        told, asked, digits = [], [], []
        for place in torch.randperm(len(THINGS), generator=generator).tolist()[:FACTS]:
            number = "".join(map(str, torch.randint(10, (DIGITS,), generator=generator).tolist()))
            told.append(_ids(tokenizer, f"\n\nNote that the number of the {THINGS[place]} is {number}.\n\n"))
            question = [_ids(tokenizer, x) for x in (f"\n\nWhat is the number of the {THINGS[place]}? It is", " ")]
            digits.append(_ids(tokenizer, number))
            asked.append([*question[0], *question[1]])
        order = torch.randperm(FACTS, generator=generator).tolist()
        questions = sum(len(asked[i]) + len(digits[i]) for i in order)
        body = passages(tokenizer, text, context=context, count=1, seed=seed, split=split)[0].tolist()
        room = context - sum(map(len, told)) - questions
        if room < FACTS:
            raise AttngapError(f"{FACTS} facts and questions need more than {context} tokens. Give a longer context")
        body, each = body[:room], room // FACTS
        whole: list[int] = []
        for i, fact in enumerate(told):
            cut = i * each + each // 3
            whole += [*body[i * each : cut], *fact, *body[cut : (i + 1) * each]]
        whole += body[FACTS * each :]
        places: dict[int, range] = {}
        for i in order:
            start = len(whole) + len(asked[i])
            places[i] = range(start, start + len(digits[i]))
            whole += [*asked[i], *digits[i]]
        return cls(torch.tensor([whole]), questions, tuple(places[i] for i in reversed(range(FACTS))))


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False).input_ids


@torch.no_grad()
def samples(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, context: int, count: int, seed: int
) -> Int[Tensor, "count context"]:
    """Text drawn from the model at temperature one, each piece from a random first token."""
    each = -(-context // SAMPLE_LENGTH)
    length, pieces = -(-context // each), each * count
    generator = torch.Generator().manual_seed(seed)
    special = set(tokenizer.all_special_ids)
    ordinary = torch.tensor([i for i in range(len(tokenizer)) if i not in special])
    tokens = ordinary[torch.randint(len(ordinary), (pieces, 1), generator=generator)]
    last_only = "logits_to_keep" in inspect.signature(model.forward).parameters
    step, cache = tokens, None
    forbidden = torch.tensor(sorted(special), dtype=torch.long)
    while tokens.shape[1] < length:
        result = model(step, past_key_values=cache, use_cache=True, **({"logits_to_keep": 1} if last_only else {}))
        odds = result.logits[:, -1:].float().index_fill(2, forbidden, -torch.inf).softmax(-1)
        step = draw_labels(odds, 1, generator)[:, 0]
        cache = result.past_key_values
        tokens = torch.cat((tokens, step), 1)
    return tokens.reshape(count, -1)[:, :context]
