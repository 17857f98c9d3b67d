"""From words to tokens: a context of so many tokens, with statements woven into real text, and its questions."""

import dataclasses
import functools
import random
import re
from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from attngap.errors import AttngapError
from attngap.heads.passages import special_tokens

ASKED = 4  # questions about one context of records


@dataclasses.dataclass(frozen=True)
class Question:
    """What is asked once the context has been read, and the tokens that answer it."""

    ask: tuple[int, ...]
    answer: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Example:
    """One context and its questions. Each question is asked of the context alone, as if no other had been."""

    context: Int[Tensor, "1 t"]
    questions: tuple[Question, ...]


class Writer:
    """Writes the examples of one length with one tokenizer; the filler is real text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, text: str, length: int, rng: random.Random):
        self.tokenizer, self.text, self.length, self.rng = tokenizer, text, length, rng
        self.prefix, _ = special_tokens(tokenizer)
        self.words = sorted(set(re.findall(r"(?<![\w'])[a-z]{4,8}(?![\w'])", text)))

    @functools.cached_property
    def _text_tokens(self) -> list[int]:
        return self.encode(self.text)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids

    def number(self, digits: int = 5) -> str:
        return "".join(str(self.rng.randrange(10)) for _ in range(digits))

    def pick_words(self, count: int) -> list[str]:
        if len(self.words) < count:
            raise AttngapError(
                f"This task needs {count} different words, and the text has {len(self.words)}. Give more text"
            )
        return self.rng.sample(self.words, count)

    def question(self, ask: str, answer: str) -> Question:
        """`ask` ends without a space; where the tokenizer gives the space a token of its own, it belongs to the ask."""
        asked, answered, space = self.encode(ask), self.encode(" " + answer), self.encode(" ")
        if answered[: len(space)] == space:
            asked, answered = asked + space, answered[len(space) :]
        return Question(tuple(asked), tuple(answered))

    def weave(self, statements: Sequence[tuple[float, str]], questions: Sequence[Question]) -> Example:
        """Filler with each statement at its depth; context, longest question and answer together fill the length."""
        return self.weave_tokens([(depth, self.encode(statement)) for depth, statement in statements], questions)

    def weave_tokens(self, pieces: Sequence[tuple[float, list[int]]], questions: Sequence[Question]) -> Example:
        """The same with statements that are tokens already."""
        pieces = sorted(pieces, key=lambda pair: pair[0])
        room = self.room(questions) - sum(len(piece) for _, piece in pieces)
        filler = self.filler(room)
        body, done = [], 0
        for depth, piece in pieces:
            cut = int(depth * room)
            body += filler[done:cut] + piece
            done = cut
        return self.example(body + filler[done:], questions)

    def fill(self, records: Sequence[tuple[str, Question]], asked: int = ASKED) -> Example:
        """As many records as fit, one after the other, and the questions of some of them, spread over the context."""
        room, body, held = self.room([question for _, question in records]), [], 0
        for line, _ in records:
            tokens = self.encode(line)
            if len(body) + len(tokens) > room:
                break
            body += tokens
            held += 1
        if held < asked:
            raise AttngapError(f"A length of {self.length} tokens has no room for {asked} records. Give a longer one")
        places = [int((i + self.rng.random()) / asked * held) for i in range(asked)]
        return self.example(body, [records[place][1] for place in places])

    def room(self, questions: Sequence[Question]) -> int:
        longest = max(len(q.ask) + len(q.answer) for q in questions)
        return self.length - len(self.prefix) - longest

    def filler(self, count: int) -> list[int]:
        """So many tokens of the text, from anywhere in it."""
        if count < 1:
            raise AttngapError(f"A length of {self.length} tokens has no room for this task. Give a longer one")
        tokens = self._text_tokens
        if len(tokens) < count:
            raise AttngapError(
                f"The text has {len(tokens)} tokens, and a context of {self.length} needs {count}. Give more text"
            )
        start = self.rng.randrange(len(tokens) - count + 1)
        return tokens[start : start + count]

    def example(self, body: list[int], questions: Sequence[Question]) -> Example:
        return Example(torch.tensor([[*self.prefix, *body]]), tuple(questions))
