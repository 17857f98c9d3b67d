"""Options of a run: one frozen, validated object, from which command line, checkpoints and records all read.

Nothing here imports torch, so that `attngap --help` need not wait for it.
"""

from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from attngap.errors import AttngapError, unknown

Granularity = Literal["group", "head"]
Chosen = TypeVar("Chosen", bound="Options")

# One set of defaults for diagnosis, plan and conversion (measured in docs/results.md); without a plan a conversion has
# a wider window of its own.
# Exact keys nearby bought more quality for their memory than features did: at 16k tokens 256 of them and their
# features are 3.6% of a head's cache.
WINDOW = 256
# The first tokens take half of the weight of many heads; without them no window works (arXiv 2309.17453).
SINKS = 4
# Heads that share a key head share its cache, which goes only when all of them are replaced.
GRANULARITY: Granularity = "group"
# A tenth of the heads carries most of the damage.
KEEP = 0.1
# Of a window's room, for tokens from anywhere in a prompt that every head has read exactly: at equal bytes half of it
# takes off about half of the divergence of the next 128 tokens on most texts (docs/rivals.md).
HELD = 0.5
# What a model is loaded in, and on; "auto" is the checkpoint's own precision, and the first accelerator there is.
DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("cpu", "cuda", "cuda:1", "mps", "auto")


class Options(BaseModel):
    """A base for options: unknown names and impossible values are refused in one line."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, **given: Any):
        try:
            super().__init__(**given)
        except ValidationError as error:
            raise _refusal(type(self), error.errors()[0]) from None

    def but(self: Chosen, **changes: Any) -> Chosen:
        """The same options with some of them changed, checked anew; what was not given stays not given."""
        return type(self)(**{name: getattr(self, name) for name in self.model_fields_set} | changes)

    def record(self) -> dict[str, Any]:
        """For JSON: a receipt, a checkpoint's key."""
        return self.model_dump(mode="json")

    @classmethod
    def default(cls, name: str) -> Any:
        """For a command line."""
        return cls.model_fields[name].default

    @classmethod
    def help(cls, name: str) -> str:
        """What an option means, for a command line."""
        return cls.model_fields[name].description or ""


def _refusal(kind: type[Options], error: ErrorDetails) -> AttngapError:
    if error["type"] == "extra_forbidden":
        return unknown("option", str(error["loc"][0]), kind.model_fields)
    context = error.get("ctx", {})
    if isinstance(context.get("error"), AttngapError):  # raised by a validator of ours, which says it all
        return context["error"]
    name, got = ".".join(map(str, error["loc"])), error["input"]
    for limit, words in (("ge", "at least"), ("gt", "more than"), ("le", "at most"), ("lt", "less than")):
        if limit in context:
            return AttngapError(f"{name} must be {words} {context[limit]}, got {got}")
    if "expected" in context:
        return AttngapError(f"{name} must be {context['expected']}, got {got!r}")
    return AttngapError(f"{name} is wrong: {error['msg']}, got {got!r}")
