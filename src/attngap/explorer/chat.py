"""A conversation with the original and the converted model side by side, a token of each in turn."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attngap.errors import AttngapError
from attngap.explorer.sentence import Sentences
from attngap.models.stream import Conversation, Message, Step

MOST_MESSAGES = 64
MOST_NEW = 400


class Chat:
    """Each model keeps its cache from turn to turn; the history comes with every question."""

    def __init__(self, sentences: Sentences):
        self.sentences = sentences
        self.talks = {name: Conversation(model, sentences.tokenizer) for name, model in sentences.models.items()}

    def lines(self, histories: Mapping[str, Sequence[Message]], tokens: int) -> Iterator[str]:
        """JSON lines: {model, text, tokens, cache_bytes, seconds}, or {error}, as they come."""
        if not 1 <= tokens <= MOST_NEW:
            raise AttngapError(f"tokens must be 1 to {MOST_NEW}, got {tokens}")
        for name, messages in histories.items():
            if name not in self.talks or not 1 <= len(messages) <= MOST_MESSAGES:
                known = ", ".join(self.talks)
                raise AttngapError(f"A history has 1 to {MOST_MESSAGES} messages and is of one of: {known}")
            if any(message.keys() != {"role", "content"} for message in messages):
                raise AttngapError("A message has a role and a content")
        return self._stream({name: self.talks[name].reply(each, limit=tokens) for name, each in histories.items()})

    def _stream(self, replies: dict[str, Iterator[Step]]) -> Iterator[str]:
        while replies:
            for name in list(replies):
                try:
                    with self.sentences.lock:
                        step = next(replies[name])
                except StopIteration:
                    del replies[name]
                    yield _line({"model": name, "done": True})
                except (AttngapError, RuntimeError) as error:
                    del replies[name]
                    yield _line({"model": name, "error": str(error)})
                else:
                    about = {"tokens": step.tokens, "cache_bytes": step.cache_bytes, "seconds": step.seconds}
                    yield _line({"model": name, "text": step.text, **about})


def _line(content: dict[str, Any]) -> str:
    return json.dumps(content) + "\n"
