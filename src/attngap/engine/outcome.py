"""What became of one job."""

import dataclasses
import traceback
from collections.abc import Callable
from typing import Any

from attngap.errors import AttngapError


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The value of job number `index`, or why there is none."""

    index: int
    value: Any = None
    error: str | None = None
    attempts: int = 1


def attempt(function: Callable[[Any], Any], index: int, job: Any) -> Outcome:
    """Run one job where it is; an exception is its outcome and does not disturb the others.

    It is not tried again: a job decides everything by its own seed, so it would fail alike.
    """
    try:
        return Outcome(index, function(job))
    except AttngapError as error:
        return Outcome(index, error=str(error))
    except Exception:
        return Outcome(index, error=traceback.format_exc(limit=-4))
