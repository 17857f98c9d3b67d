"""How a model is run while it is looked at."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

from torch import nn

from attngap.errors import AttngapError

Function = TypeVar("Function", bound=Callable)


@contextlib.contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Inside, no module is in training mode: dropout would make every number another one. Restored module by module."""
    training = [part for model in models for part in model.modules() if part.training]
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True


@contextlib.contextmanager
def tokens_suffice(model: nn.Module) -> Iterator[None]:
    """For the first run of a model: what it needs beside tokens, images, codebooks or a language, is told in a line."""
    try:
        yield
    except AttngapError:
        raise
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise AttngapError(f"{type(model).__name__} does not run on tokens alone: {reason}") from error


def in_evaluation(function: Function) -> Function:
    """Of a function whose first argument is a model: it runs in evaluation mode, whatever mode it is given in."""

    @functools.wraps(function)
    def run(model: Any, *args: Any, **options: Any) -> Any:
        with evaluating(model) if isinstance(model, nn.Module) else contextlib.nullcontext():
            return function(model, *args, **options)

    return cast(Function, run)
