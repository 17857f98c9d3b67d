"""Which last tokens a model predicts, of many passages that begin alike: what several begin with is read once."""

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from attngap.heads.forward import outputs
from attngap.models.placement import device_of

WORTH = 64  # tokens that two passages must share, or a copy of the cache costs as much
Asked = tuple[Int[Tensor, "1 _"], int]  # a passage, and how many of its last tokens are to be predicted


@torch.no_grad()
def guessed(model: PreTrainedModel, asked: Sequence[Asked]) -> list[Bool[Tensor, " _"]]:
    """Which of the last tokens of each passage are predicted, every token given once it was guessed."""
    if model.config.is_encoder_decoder:
        return [_right(outputs(model, tokens, count + 1), tokens, count) for tokens, count in asked]
    found: dict[int, Tensor] = {}
    _Reader(model, asked, found).walk(list(range(len(asked))), 0, None)
    return [found[place] for place in range(len(asked))]


class _Reader:
    """Walks the tree of beginnings; `found` gets the answers by place."""

    def __init__(self, model: PreTrainedModel, asked: Sequence[Asked], found: dict[int, Tensor]):
        self.model, self.asked, self.found = model, asked, found
        self.last_only = "logits_to_keep" in inspect.signature(model.forward).parameters

    def walk(self, places: list[int], read: int, cache: DynamicCache | None) -> None:
        """These passages share their first `read` tokens, which the cache holds; it is not changed."""
        while places:
            first = places[0]
            alike = [place for place in places if place == first or self._shared(first, place) - read >= WORTH]
            places = [place for place in places if place not in alike]
            if len(alike) == 1:
                self.found[first] = self._finish(first, read, cache)
                continue
            until = min(self._shared(first, place) for place in alike[1:])
            self.walk(alike, until, self._advance(first, read, until, cache))

    def _shared(self, one: int, other: int) -> int:
        """Tokens that both begin with, short of those that are asked for and the one before them."""
        (a, count), (b, more) = self.asked[one], self.asked[other]
        length = min(a.shape[1] - count, b.shape[1] - more) - 1
        differ = (a[0, :length] != b[0, :length]).nonzero()
        return int(differ[0]) if len(differ) else length

    def _advance(self, place: int, read: int, until: int, cache: DynamicCache | None) -> DynamicCache:
        after = DynamicCache(config=self.model.config) if cache is None else copy.deepcopy(cache)
        self._forward(self.asked[place][0][:, read:until], after, 1)
        return after

    def _finish(self, place: int, read: int, cache: DynamicCache | None) -> Tensor:
        tokens, count = self.asked[place]
        if cache is None:
            return _right(outputs(self.model, tokens, count + 1), tokens, count)
        return _right(self._forward(tokens[:, read:], copy.deepcopy(cache), count + 1), tokens, count)

    def _forward(self, tokens: Tensor, cache: DynamicCache, last: int) -> Tensor:
        options: dict[str, Any] = {"logits_to_keep": last} if self.last_only else {}
        tokens = tokens.to(device_of(self.model))
        return self.model(input_ids=tokens, past_key_values=cache, use_cache=True, **options).logits


def _right(logits: Tensor, tokens: Tensor, count: int) -> Tensor:
    return logits[0, -count - 1 : -1].argmax(-1).cpu() == tokens[0, -count:]
