"""Every numbered statement of docs/theory.md, run: true ones against brute force, false ones against an example."""

import dataclasses
import time
from collections.abc import Callable, Iterator

Check = Callable[[], str]
FALSE_SECTION = 6  # the section of docs/theory.md that lists tempting statements with their counterexamples


class RefutedError(AssertionError):
    """A check found evidence against what it should show; the message is that evidence."""


@dataclasses.dataclass(frozen=True)
class Statement:
    """`number` is that of docs/theory.md, such as "3.2". `claim` is always true as printed.

    For a counterexample the claim says what the example shows.
    """

    number: str
    claim: str
    check: Check

    @property
    def counterexample(self) -> bool:
        return self.number.startswith(f"{FALSE_SECTION}.")


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
    """All of them, in the order of docs/theory.md."""
    from attngap.theory.checks.counterexamples import COUNTEREXAMPLES
    from attngap.theory.checks.damage import DAMAGE
    from attngap.theory.checks.rank import RANK
    from attngap.theory.checks.selection import SELECTION
    from attngap.theory.checks.separation import SEPARATION

    return SEPARATION + SELECTION + RANK + DAMAGE + COUNTEREXAMPLES


def run(chosen: tuple[Statement, ...] | None = None) -> Iterator[Outcome]:
    """Check one statement after the other. A check that crashes counts as failed: it has shown nothing."""
    for statement in statements() if chosen is None else chosen:
        start = time.perf_counter()
        try:
            evidence, holds = statement.check(), True
        except Exception as error:
            evidence, holds = f"{type(error).__name__}: {error}", False
        yield Outcome(statement, holds, evidence, time.perf_counter() - start)
