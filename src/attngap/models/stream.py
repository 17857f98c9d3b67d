"""A conversation with a model, token by token, in a cache that is kept from one turn to the next."""

import dataclasses
import inspect
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from attngap.errors import AttngapError
from attngap.models.cache import cache_bytes
from attngap.models.placement import device_of

Message = dict[str, str]  # role ("user" or "assistant") and content


@dataclasses.dataclass(frozen=True)
class Step:
    """What one more token brought."""

    text: str  # what can be shown now; a letter that takes several tokens comes with its last
    tokens: int  # in the cache
    cache_bytes: int
    seconds: float


class Conversation:
    """One model that remembers what it has read: only what is new since the last turn goes through it."""

    def __init__(self, model: PreTrainedModel, tokenizer: Any):
        if not model.can_generate():
            raise AttngapError("An encoder writes no text. Use attngap.load and call the model")
        if model.config.is_encoder_decoder:
            raise AttngapError("A conversation needs a decoder; this model has an encoder too. Use attngap generate")
        self.model, self.tokenizer = model, tokenizer
        self.read: list[int] = []
        self.cache = DynamicCache(config=model.config)

    @torch.no_grad()
    def reply(
        self, messages: Sequence[Message], *, limit: int = 128, temperature: float = 0.0, seed: int = 0
    ) -> Iterator[Step]:
        """Continue the conversation by at most `limit` tokens; temperature 0 takes the likeliest every time."""
        ids = prompt_ids(self.tokenizer, messages)
        dice = torch.Generator().manual_seed(seed)
        written: list[int] = []
        shown = ""
        new = self._unread(ids)
        ends = _ends(self.model)
        while len(written) < limit:
            start = time.perf_counter()
            token = choose(self._feed(new), temperature, dice)
            if token in ends:
                return
            written.append(token)
            new = [token]
            whole = str(self.tokenizer.decode(written, skip_special_tokens=True))
            text = "" if whole.endswith("\N{REPLACEMENT CHARACTER}") else whole[len(shown) :]
            shown += text
            yield Step(text, len(self.read), cache_bytes(self.cache), time.perf_counter() - start)

    def _unread(self, ids: list[int]) -> list[int]:
        """What the cache has not seen; a conversation that went another way starts a new one."""
        if self.read != ids[: len(self.read)] or len(self.read) >= len(ids):
            self.read, self.cache = [], DynamicCache(config=self.model.config)
        return ids[len(self.read) :]

    def _feed(self, ids: list[int]) -> Float[Tensor, " vocabulary"]:
        only_last = {"logits_to_keep": 1} if _takes(self.model, "logits_to_keep") else {}
        inputs = torch.tensor([ids], device=device_of(self.model))
        out: Any = self.model(input_ids=inputs, past_key_values=self.cache, use_cache=True, **only_last)
        self.read += ids
        return out.logits[0, -1].float()


def prompt_ids(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Tokens of a conversation: in the model's chat template, or just one text after the other where it has none."""
    if getattr(tokenizer, "chat_template", None):
        text = str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True))
        ids = tokenizer(text, add_special_tokens=False).input_ids
    else:
        ids = tokenizer("".join(message["content"] for message in messages)).input_ids
    if not ids:
        raise AttngapError("The prompt is empty. Give some text to continue")
    return list(ids)


def choose(logits: Float[Tensor, " vocabulary"], temperature: float, dice: torch.Generator) -> int:
    if not temperature:
        return int(logits.argmax())
    return int(torch.multinomial((logits.cpu() / temperature).softmax(-1), 1, generator=dice))


def _ends(model: PreTrainedModel) -> set[int]:
    found = model.generation_config.eos_token_id if model.generation_config else None
    return set(found) if isinstance(found, list) else set() if found is None else {int(found)}


def _takes(model: PreTrainedModel, name: str) -> bool:
    return name in inspect.signature(model.forward).parameters
