"""The parts of the long run: each is a list of units, small enough to be lost by a kill and started again."""

import dataclasses
import functools
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.trust.outcome import Outcome

Unit = tuple[Any, ...]  # plain values: a unit is also its own name
FILES = 100  # damaged files in a unit
FIRST = int(os.environ.get("ATTNGAP_TRUST_SEED", "0"))  # of the damaged files: another number damages them otherwise
# Damaged files by kind; others get FEW: they take a tenth of a second.
MANY, FEW = 4_000, 200
CHEAP = ("plan", "receipt", "diagnosis", "sweep file", "run database", "piece of a run", "training checkpoint")
CHEAP += ("results of a suite", "answers of a suite", "text")
SOME = {
    "record of a conversion": 3_000,
    "record of the schema before": 2_000,
    "adapter": 2_000,
    "config of a base": 1_500,
}
SOME |= {"weights of a base": 1_000, "GGUF header": 1_500, "explorer's shelf": 1_000}


@dataclasses.dataclass(frozen=True)
class Part:
    """What it tries, its units, and how one is run."""

    about: str
    units: Callable[[], list[Unit]]
    run: Callable[..., Outcome]


def kill_units() -> list[Unit]:
    """Every step on disk of a conversion, every third of a diagnosis, and random moments of all."""
    from tests.trust.kills import VERBS

    found: list[Unit] = []
    for verb in VERBS:
        steps = range(0, 144, 3) if verb == "diagnose" else range(50)
        found += [(verb, how, step) for step in steps for how in ("killed", "disk full")]
        moments = [f"{how} at a random time" for how in ("killed", "interrupted")]
        found += [(verb, how, number) for number in range(20) for how in moments]
    return found


@functools.cache
def bench() -> Any:
    from tests.trust.kills import Bench

    return Bench(Path(tempfile.mkdtemp(prefix="attngap-trust-")))


def kill(verb: str, how: str, step: int) -> Outcome:
    from tests.trust.kills import disturb

    return disturb(bench(), verb, how, step)


def file_units() -> list[Unit]:
    from tests.trust.files import KINDS

    number = {kind: MANY if kind in CHEAP else SOME.get(kind, FEW) for kind in KINDS}
    return [(kind, FIRST + seed) for kind in KINDS for seed in range(number[kind] // FILES)]


def damage(kind: str, seed: int) -> Outcome:
    from tests.trust.files import damage

    return damage(kind, FILES, seed)


def numbers(number: int) -> Outcome:
    from tests.trust.numerics import batch

    return batch(number)


def fence(number: int) -> Outcome:
    from tests.trust import fenced_calls, fenced_products
    from tests.trust.fences import batch, decode

    outcome = batch(number)
    outcome.add(decode(number))
    outcome.add(fenced_calls.batch(number))
    outcome.add(fenced_products.batch(number))
    return outcome


def token_units() -> list[Unit]:
    from tests.trust.million import names

    return [(name,) for name in names()]


def tokens(name: str) -> Outcome:
    from tests.trust.million import stream

    return stream(name)


def request(number: int) -> Outcome:
    from tests.trust.requests import batch

    return batch(number)


PARTS = {
    "kills": Part("runs killed, interrupted or out of disk, at each step; started again", kill_units, kill),
    "files": Part("damaged files", file_units, damage),
    "numerics": Part("hostile numbers against float64", lambda: [(i,) for i in range(120)], numbers),
    "fences": Part("kernels between forbidden pages", lambda: [(i,) for i in range(150)], fence),
    "requests": Part("odd requests to the explorer", lambda: [(i,) for i in range(25)], request),
    "tokens": Part("a million tokens through one state", token_units, tokens),
}
