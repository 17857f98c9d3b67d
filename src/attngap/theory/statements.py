"""Every statement of the theory, run: true ones against brute force, tempting false ones against a counterexample."""

import dataclasses
import time
from collections.abc import Callable, Iterator

Check = Callable[[], str]


class RefutedError(AssertionError):
    """A check found evidence against what it should show; the message is that evidence."""


@dataclasses.dataclass(frozen=True)
class Statement:
    """`claim` is always true as printed. For a counterexample it says what the example shows."""

    section: int
    claim: str
    check: Check
    counterexample: bool = False


@dataclasses.dataclass(frozen=True)
class Outcome:
    statement: Statement
    holds: bool
    evidence: str
    seconds: float


def require(condition: bool, evidence: str) -> None:
    if not condition:
        raise RefutedError(evidence)


def statements() -> tuple[Statement, ...]:
    """All of them, in the order of the theory."""
    from attngap.theory.shown_counterexamples import COUNTEREXAMPLES
    from attngap.theory.shown_rank import RANK
    from attngap.theory.shown_separation import SEPARATION

    return SEPARATION + RANK + COUNTEREXAMPLES


def run(chosen: tuple[Statement, ...] | None = None) -> Iterator[Outcome]:
    """Check one statement after the other. A check that crashes counts as failed: it has shown nothing."""
    for statement in statements() if chosen is None else chosen:
        start = time.perf_counter()
        try:
            evidence, holds = statement.check(), True
        except Exception as error:
            evidence, holds = f"{type(error).__name__}: {error}", False
        yield Outcome(statement, holds, evidence, time.perf_counter() - start)
