"""What a conversion does, and for how long."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, model_validator

from attngap.errors import AttngapError
from attngap.options import GRANULARITY, KEEP, SINKS, Granularity, Options

# Twice that of a diagnosis, whose passages of 1,024 tokens would not show what lies farther back: on other kinds of
# text it took off about half of the divergence, for some 6% of the original's cache at 4,096 tokens (docs/results.md).
CONVERTED_WINDOW = 512
# Of the same room. A tenth to a fifth of it for the tokens that queries weigh most halves the divergence at any length,
# more of it gains less (docs/results.md).
HELD_SHARE = 0.2


class ConversionOptions(Options):
    """Options of `attngap.linearize` and `attngap linearize`. A plan stands in for those that are not given."""

    keep: Annotated[float | None, Field(description="Share of heads to keep, those it hurts most to replace.")] = KEEP
    max_ppl_ratio: Annotated[float | None, Field(description="Keep as few heads as this ratio allows.")] = None
    max_ppl_length: Annotated[
        int | None, Field(ge=16, description="Tokens the ratio must hold at, over the last ones; none: --context.")
    ] = None
    granularity: Annotated[
        Granularity, Field(description="Keep whole groups of heads that share a key head, or single ones.")
    ] = GRANULARITY
    mechanism: Annotated[
        str, Field(description="Feature map of what lies far; with a window of 0 any mechanism, on its own.")
    ] = "prototype"
    window: Annotated[int, Field(ge=0, description="Last keys kept exact, the mean over layers.")] = CONVERTED_WINDOW
    even_windows: Annotated[bool, Field(description="The same window in every layer.")] = False
    held: Annotated[
        float, Field(ge=0, lt=1, description="Share of a window for tokens from anywhere, chosen as text goes on.")
    ] = HELD_SHARE
    sinks: Annotated[int, Field(ge=0, description="First keys kept exact.")] = SINKS
    context: Annotated[int, Field(ge=16, description="Tokens per short passage.")] = 1024
    tokens: Annotated[int, Field(description="Calibration tokens in short passages.")] = 12288
    length: Annotated[
        int | None, Field(ge=16, description="Tokens it is for; none: the model's own positions, up to 8,192.")
    ] = None
    steps: Annotated[int, Field(ge=0, description="Steps of fitting each layer.")] = 100
    joint: Annotated[int, Field(ge=0, description="Steps of fitting all layers together.")] = 24
    rounds: Annotated[int, Field(ge=0, description="Rounds of choosing kept heads.")] = 2
    lora: Annotated[int, Field(ge=0, description="Rank of LoRA; 0 for none.")] = 0
    seed: Annotated[int, Field(ge=0, description="Chooses passages and order.")] = 0

    @model_validator(mode="after")
    def _agree(self) -> "ConversionOptions":
        given = self.model_fields_set
        if {"keep", "max_ppl_ratio"} <= given and None not in (self.keep, self.max_ppl_ratio):
            raise AttngapError("keep and max_ppl_ratio both say how many heads to keep. Give one of them")
        if self.keep is not None and not 0 <= self.keep <= 1:
            raise AttngapError(f"keep takes a share from 0 to 1, got {self.keep}. For a tenth of the heads: 0.1")
        if self.max_ppl_ratio is not None and not self.max_ppl_ratio > 0:
            raise AttngapError(f"max_ppl_ratio must be positive, such as 1.02, got {self.max_ppl_ratio}")
        if self.max_ppl_length is not None and self.max_ppl_ratio is None:
            raise AttngapError("max_ppl_length is the length a max_ppl_ratio must hold at. Give that too")
        if self.tokens < 2 * self.context:
            raise AttngapError(f"tokens must be at least {2 * self.context}, got {self.tokens}")
        return self


def exact_tokens(options: Mapping[str, Any], windows: Mapping[Any, int]) -> str:
    """What replaced heads read exactly besides sinks, from a receipt's options and windows.

    >>> exact_tokens({"window": 512}, {}), exact_tokens({"window": 512}, {0: 128, 1: 1536})
    ('the last 512 tokens', 'the last 128 to 1,536 tokens (by layer, at most 512 on average)')
    >>> exact_tokens({"window": 512, "held": 0.2}, {})
    'the last 512 tokens, 20% of that room given to tokens from anywhere'
    """
    window, held = options["window"], options.get("held")
    found = f"the last {window:,} tokens"
    if windows:
        low, high = min(windows.values()), max(windows.values())
        found = f"the last {low:,} to {high:,} tokens (by layer, at most {window:,} on average)"
    return f"{found}, {held:.0%} of that room given to tokens from anywhere" if held else found
