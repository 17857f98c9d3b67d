"""Named options, checked against the signature that takes them: an unknown one is refused, never swallowed."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from attngap.errors import unknown

T = TypeVar("T")


def build(make: Callable[..., T], name: str, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> T:
    """`make(*arguments, **options)` after checking that `make` has such options."""
    allowed = option_names(make)
    for option in options:
        if option not in allowed:
            raise unknown(f"{name} option", option, allowed, "" if allowed else f"{name} takes no options")
    return make(*arguments, **options)


def option_names(make: Callable[..., Any]) -> tuple[str, ...]:
    """The keyword-only parameters of a constructor."""
    parameters = inspect.signature(make).parameters.values()
    return tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)
