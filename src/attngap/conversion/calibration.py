"""What a conversion is fitted to: passages of text, text the model writes itself, and repeated random tokens.

A model's own samples are text of every kind it knows, so features fitted to them hold on text unlike the calibration
files; repeated tokens are what its recall heads are for.
"""

import dataclasses
import hashlib
import inspect

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from attngap.errors import AttngapError
from attngap.heads.damage import draw_labels
from attngap.heads.passages import special_tokens, split_tokens, stress
from attngap.models.placement import device_of

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


def seed_for(seed: int, role: str, number: int = 0) -> int:
    """The seed of what a role draws the `number`-th time: no two roles or numbers share one, however many there are."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{role}/{number}".encode()).digest()[:6])


class TextParts:
    """The part of a text that calibrates, cut so that nothing that judges is ever fitted to.

    What judges is taken first. Passages to be fitted to are cut from the rest; where that is short, the long passage,
    which is fitted to as well, is cut again.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, text: str | list[str] | None, seed: int):
        self._prefix, self._suffix = special_tokens(tokenizer)
        tokens = split_tokens(tokenizer, text)
        generator = torch.Generator().manual_seed(seed_for(seed, "text"))
        start = int(torch.randint(max(1, len(tokens)), (), generator=generator))
        self._left = tokens[start:] + tokens[:start]
        self._again: list[int] = []
        self._generator = generator

    def judging(self, length: int) -> Int[Tensor, "1 length"]:
        """A passage that is never handed out again."""
        return torch.tensor([self._passage(self._take(length))])

    def long(self, length: int) -> Int[Tensor, "1 length"]:
        """A passage to fit to."""
        taken = self._take(length)
        self._again += taken
        return torch.tensor([self._passage(taken)])

    def short(self, length: int, count: int) -> Int[Tensor, "count length"]:
        """Passages to fit to, from all over the text."""
        body = length - len(self._prefix) - len(self._suffix)
        left = self._left if len(self._left) >= count * body else self._left + self._again
        room = len(left) // body
        if room < count:
            raise AttngapError(
                f"The text is too short: {len(left)} tokens are left to fit to, room for {room} passages of {length}; "
                f"{count} wanted. Give more text, fewer tokens or a shorter context"
            )
        order = torch.randperm(room, generator=self._generator)[:count].tolist()
        return torch.tensor([self._passage(left[i * body : (i + 1) * body]) for i in order])

    def _take(self, length: int) -> list[int]:
        body = length - len(self._prefix) - len(self._suffix)
        if body < 1 or len(self._left) < body:
            raise AttngapError(
                f"The text is too short: {len(self._left)} tokens are left, and a passage of {length} is wanted. Give "
                "more text or a shorter length"
            )
        taken, self._left = self._left[:body], self._left[body:]
        return taken

    def _passage(self, body: list[int]) -> list[int]:
        return [*self._prefix, *body, *self._suffix]


def calibration(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    parts: TextParts,
    judge: Int[Tensor, "1 context"],
    shares: Shares,
    *,
    context: int,
    window: int,
    seed: int,
) -> Int[Tensor, "count context"]:
    """All passages, kinds interleaved; the last are one of each kind, for those judge the fit, `judge` that of text."""
    kinds = [torch.cat((parts.short(context, shares.text - 1), judge)) if shares.text > 1 else judge]
    if shares.sampled:
        kinds.append(samples(model, tokenizer, context=context, count=shares.sampled, seed=seed_for(seed, "samples")))
    if shares.repeated:
        seeds = [seed_for(seed, "repeated", i) for i in range(shares.repeated)]
        kinds.append(torch.cat([repeats(tokenizer, context=context, beyond=window, seed=each) for each in seeds]))
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
    once, _ = stress(tokenizer, context=2 * period, seed=seed, period=period)
    return once.repeat(1, 3)[:, :context]


def period_of(tokens: Int[Tensor, "1 t"]) -> int:
    """After how many tokens a repeated passage begins anew."""
    return int((tokens[0, 1:] == tokens[0, 0]).nonzero()[0]) + 1


@dataclasses.dataclass(frozen=True, eq=False)
class FactsPassage:
    """Text, then questions; `answers` are the places of each number's digits in the questions, nearest fact first."""

    tokens: Int[Tensor, "1 context"]
    asked: int  # tokens of questions, the last ones
    answers: tuple[range, ...]

    @classmethod
    def make(
        cls, tokenizer: PreTrainedTokenizerBase, passage: Int[Tensor, "1 context"], *, seed: int
    ) -> "FactsPassage":
        """A passage with numbers stated in it, evenly spread; its end gives way to them and to the questions."""
        context = passage.shape[1]
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
        room = context - sum(map(len, told)) - questions
        if room < FACTS:
            raise AttngapError(f"{FACTS} facts and questions need more than {context} tokens. Give a longer context")
        body, each = passage[0, :room].tolist(), room // FACTS
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
    forbidden, device = torch.tensor(sorted(special), dtype=torch.long), device_of(model)
    options = {"use_cache": True} | ({"logits_to_keep": 1} if last_only else {})
    while tokens.shape[1] < length:
        result = model(step.to(device), past_key_values=cache, **options)
        odds = result.logits[:, -1:].float().cpu().index_fill(2, forbidden, -torch.inf).softmax(-1)
        step = draw_labels(odds, 1, generator)[:, 0]
        cache = result.past_key_values
        tokens = torch.cat((tokens, step), 1)
    return tokens.reshape(count, -1)[:, :context]
