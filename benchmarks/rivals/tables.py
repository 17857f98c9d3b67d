"""From answers to docs/rivals.md: means, paired intervals, and who is ahead."""

import argparse
import dataclasses
import random
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from asking import ANSWERS, read_lines
from conversions import OURS
from presses import ORIGINAL

TASKS = ("needle", "needles", "lookup", "copying", "repetition")
DRAWS, BLOCK = 1000, 16  # of the bootstrap; tokens of text that are drawn together
LEVEL, AHEAD, BEHIND = "level within noise", "**ahead**", "behind"
Key = tuple  # kind, length, example, place in the context


@dataclasses.dataclass(frozen=True)
class Found:
    """One method at one budget and length: answers by question, divergence and loss by block of text."""

    share: float
    recall: dict[str, dict[Key, float]]  # by task
    divergence: dict[Key, float]
    loss: dict[Key, float]
    contexts: frozenset[Key]

    def task(self, name: str) -> float | None:
        return statistics.mean(self.recall[name].values()) if self.recall.get(name) else None

    @property
    def mean_recall(self) -> float | None:
        return mean_over_tasks(self.recall)

    @property
    def mean_divergence(self) -> float | None:
        return statistics.mean(self.divergence.values()) if self.divergence else None


def gather(rows: Iterable[dict]) -> Found:
    recall: dict[str, dict[Key, float]] = {}
    divergence: dict[Key, float] = {}
    loss: dict[Key, float] = {}
    shares, contexts = [], set()
    for row in rows:
        at = (row["kind"], row["length"], row["example"])
        contexts.add(at)
        shares.append(row["share"])
        for place, (task, *values) in enumerate(row["scores"]):
            if task == "text":
                for found, each in zip((divergence, loss), values, strict=True):
                    found |= {(*at, i): statistics.mean(each[i : i + BLOCK]) for i in range(0, len(each), BLOCK)}
            else:
                recall.setdefault(task, {})[(*at, place)] = values[0]
    return Found(statistics.mean(shares), recall, divergence, loss, frozenset(contexts))


def mean_over_tasks(recall: dict[str, dict[Key, float]]) -> float | None:
    """Every task counts alike, however many questions it has."""
    means = [statistics.mean(answers.values()) for answers in recall.values() if answers]
    return statistics.mean(means) if means else None


def recall_interval(a: Found, b: Found | None = None, *, seed: int = 0) -> tuple[float, float]:
    """95% of the bootstrap's means over tasks, questions drawn within each; of a - b where b is given."""
    rng, found = random.Random(seed), []
    tasks = [task for task in a.recall if b is None or b.recall.get(task)]
    pairs = {task: _paired(a.recall[task], None if b is None else b.recall[task]) for task in tasks}
    for _ in range(DRAWS):
        found.append(statistics.mean(statistics.mean(rng.choices(pairs[task], k=len(pairs[task]))) for task in tasks))
    return _middle(found)


def divergence_interval(a: Found, b: Found | None = None, *, seed: int = 0) -> tuple[float, float]:
    """The same for the divergence, blocks of text drawn."""
    rng = random.Random(seed)
    pairs = _paired(a.divergence, None if b is None else b.divergence)
    return _middle([statistics.mean(rng.choices(pairs, k=len(pairs))) for _ in range(DRAWS)])


def _paired(a: dict[Key, float], b: dict[Key, float] | None) -> list[float]:
    return list(a.values()) if b is None else [a[key] - b[key] for key in a if key in b]


def _middle(found: Sequence[float]) -> tuple[float, float]:
    ordered = sorted(found)
    return ordered[int(0.025 * len(ordered))], ordered[int(0.975 * len(ordered))]


def verdict(interval: tuple[float, float], *, more_is_better: bool) -> str:
    """Of ours minus theirs."""
    low, high = interval if more_is_better else (-interval[1], -interval[0])
    return AHEAD if low > 0 else BEHIND if high < 0 else LEVEL


def cells(rows: list[dict], length: int, budget: float) -> dict[str, Found]:
    """Every method that answered all that ours answered (or the original where ours cannot be), by name."""
    mine = [row for row in rows if row["length"] == length and row["budget"] in (budget, None)]
    names = dict.fromkeys(row["method"] for row in mine)
    found = {name: gather(row for row in mine if row["method"] == name) for name in names}
    reference = found.get(OURS) or found.get(ORIGINAL)
    if reference is None:
        return {}
    return {
        name: restrict(each, reference.contexts) for name, each in found.items() if each.contexts >= reference.contexts
    }


def restrict(found: Found, contexts: frozenset[Key]) -> Found:
    def inside(values: dict[Key, float]) -> dict[Key, float]:
        return {key: value for key, value in values.items() if key[:3] in contexts}

    recall = {task: inside(answers) for task, answers in found.recall.items()}
    return Found(found.share, recall, inside(found.divergence), inside(found.loss), contexts)


def table(found: dict[str, Found]) -> list[str]:
    ours, original = found.get(OURS), found.get(ORIGINAL)
    tasks = [task for task in TASKS if any(each.task(task) is not None for each in found.values())]
    lines = [
        "| | cache | KL, nats a token | " + " | ".join(tasks) + " | mean recall (95%) | ours in recall | ours in KL |",
        "|---" * (len(tasks) + 6) + "|",
    ]
    ordered = sorted(
        found.items(), key=lambda pair: (pair[0] != ORIGINAL, pair[0] != OURS, -(pair[1].mean_recall or 0))
    )
    for name, each in ordered:
        low, high = recall_interval(each)
        cols = [name, f"{each.share:.0%}", "0" if name == ORIGINAL else f"{each.mean_divergence:.4f}"]
        cols += ["-" if (score := each.task(task)) is None else f"{score:.0%}" for task in tasks]
        cols.append(f"{each.mean_recall:.0%} ({low:.0%}-{high:.0%})")
        if ours is None or each is ours or each is original:
            cols += ["", ""]
        else:
            cols.append(verdict(recall_interval(ours, each), more_is_better=True))
            cols.append(verdict(divergence_interval(ours, each), more_is_better=False))
        lines.append("| " + " | ".join(cols) + " |")
    return lines


def read_answers(folder: Path) -> list[dict]:
    return read_lines(folder / ANSWERS)


def document(options: argparse.Namespace) -> None:
    """Print the tables of every length and budget."""
    rows = [row for row in read_answers(options.output) if not row["method"].startswith("choice: ")]
    for length in sorted({row["length"] for row in rows}):
        for budget in sorted(
            {row["budget"] for row in rows if row["budget"] and row["length"] == length}, reverse=True
        ):
            found = cells(rows, length, budget)
            if len(found) < 2:
                continue
            some = next(iter(found.values()))
            asked = sum(len(answers) for answers in some.recall.values())
            print(f"\n### {length:,} tokens, {budget:.0%} of the cache\n")
            print(f"{len(some.contexts)} contexts, {asked} questions, {len(some.divergence) * BLOCK} tokens of text.\n")
            print("\n".join(table(found)))
