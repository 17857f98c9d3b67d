"""Caches that pretend to have read a long context, for timing what comes after it."""

import copy
import inspect
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from attngap.mechanisms.variants.hybrid import Hybrid
from attngap.models.cache import fill
from attngap.models.mixed import mixed_heads
from attngap.models.placement import device_of

FAR = 64  # tokens of a prompt that are neither sinks nor in the window, so that features hold and read them


def prompt_length(model: PreTrainedModel) -> int:
    """Tokens after which every window of the model is full and features are read."""
    mechanisms = [part.mechanism for part in mixed_heads(model).values()]
    return max((m.slots for m in mechanisms if isinstance(m, Hybrid)), default=0) + FAR


def reach(model: PreTrainedModel) -> int:
    """The longest context the model can take at all: rotary positions go on, learned ones end."""
    config: Any = model.config.get_text_config()
    learned = getattr(config, "rope_parameters", None) is None
    return getattr(config, "max_position_embeddings", 2**31) if learned else 2**31


class PretendedCaches:
    """Caches of one model for any context: a prompt is read for real, the rest are random keys and values.

    How fast a token is does not depend on what they are, but it does on whether windows are full and features in use:
    the prompt is longer than any window, and a context that is no longer than that is read as a whole.
    """

    def __init__(self, model: PreTrainedModel):
        self.model, self.enough = model, prompt_length(model)
        self._read: DynamicCache | None = None  # after the prompt, which is the same for all longer contexts

    @torch.no_grad()
    def of(self, context: int) -> DynamicCache:
        """A cache of its own that holds `context` tokens."""
        if context <= self.enough:
            return self._after(context)
        if self._read is None:
            self._read = self._after(self.enough)
        cache = copy.deepcopy(self._read)
        fill(cache, context, torch.Generator().manual_seed(0))
        return cache

    def _after(self, tokens: int) -> DynamicCache:
        cache = DynamicCache(config=self.model.config)
        prompt = torch.ones(1, tokens, dtype=torch.long, device=device_of(self.model))
        last_only = "logits_to_keep" in inspect.signature(self.model.forward).parameters
        options: dict[str, Any] = {"logits_to_keep": 1} if last_only else {}
        self.model(prompt, past_key_values=cache, use_cache=True, **options)
        return cache
