"""Named options, checked against the signature that takes them: an unknown one is refused, never swallowed."""

import inspect
import numbers
import types
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from attngap.errors import AttngapError, unknown

T = TypeVar("T")


def build(make: Callable[..., T], name: str, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> T:
    """`make(*arguments, **options)` after checking that `make` has such options, of these types."""
    allowed, hints = option_names(make), _hints(make)
    for option in options:
        if option not in allowed:
            raise unknown(f"{name} option", option, allowed, "" if allowed else f"{name} takes no options")
        hint = hints.get(option, Any)
        if not _fits(options[option], hint):
            wanted = getattr(hint, "__name__", hint) if get_origin(hint) is None else hint
            raise AttngapError(f"{name} option {option} must be {wanted}, got {options[option]!r}")
    return make(*arguments, **options)


def option_names(make: Callable[..., Any]) -> tuple[str, ...]:
    """The keyword-only parameters of a constructor."""
    parameters = inspect.signature(make).parameters.values()
    return tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)


def _hints(make: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_type_hints(make.__init__ if isinstance(make, type) else make)
    except (NameError, TypeError):  # a class of another package may name types that cannot be looked up
        return {}


def _fits(value: Any, hint: Any) -> bool:
    """Strictly: "no" is not False, True is not 1, and "64" is no number. Types that say more are not looked into."""
    kind = get_origin(hint) or hint
    if kind in (Union, types.UnionType):
        return any(_fits(value, each) for each in get_args(hint))
    if kind in (int, float):
        return isinstance(value, numbers.Integral if kind is int else numbers.Real) and not isinstance(value, bool)
    return not isinstance(kind, type) or isinstance(value, kind)
