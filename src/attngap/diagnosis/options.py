"""What a diagnosis looks at."""

from typing import Annotated

from pydantic import Field, model_validator

from attngap.errors import AttngapError
from attngap.options import SINKS, WINDOW, Options

# Floors, fits and damage look at the first tokens of a passage only; statistics at all of it. Their time grows with the
# square and the cube of the length.
MAX_TOKENS = 1024


class DiagnosisOptions(Options):
    """Options of `attngap.diagnose` and `attngap diagnose`."""

    context: Annotated[int, Field(ge=16, description="Tokens per passage.")] = 1024
    passages: Annotated[int, Field(ge=1, description="Passages of text; a stress passage is added.")] = 4
    ranks: Annotated[tuple[int, ...], Field(description="State ranks of floors and ceilings.")] = (8, 16, 64, 128)
    window: Annotated[int, Field(ge=1, description="Last keys that a replacement keeps exact.")] = WINDOW
    sinks: Annotated[int, Field(ge=0, description="First keys that a replacement keeps exact.")] = SINKS
    quick: Annotated[bool, Field(description="Statistics only: no floors, fits or damage.")] = False
    verify: Annotated[int, Field(ge=0, description="Replace this many heads for real and compare.")] = 0
    seed: Annotated[int, Field(ge=0, description="Chooses passages and labels.")] = 0
    draws: Annotated[int, Field(ge=1, description="Backward passes per passage for the damage estimate.")] = 1

    @model_validator(mode="after")
    def _agree(self) -> "DiagnosisOptions":
        most = min(self.context, MAX_TOKENS)
        # A quick diagnosis has no use for ranks, so that those that are too large do no harm.
        distinct = sorted(set(self.ranks))
        fits = not distinct or (distinct[0] >= 1 and distinct[-1] < most and len(distinct) == len(self.ranks))
        if not self.quick and not fits:
            raise AttngapError(f"ranks must be distinct, from 1 to {most - 1}, got {list(self.ranks)}")
        if self.verify and self.quick:
            raise AttngapError("verify needs fitted replacements, which quick does not make. Leave out one of the two")
        return self
