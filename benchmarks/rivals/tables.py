"""From answers to docs/rivals.md: means, paired intervals, and who is ahead."""

import argparse
import dataclasses
import json
import math
import random
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from asking import ANSWERS, read_lines
from conversions import OURS
from costs import COSTS
from encoders import ENCODERS
from heads import nearest_scores
from presses import ORIGINAL
from scores import CHOICE

TASKS = ("needle", "needles", "lookup", "copying", "repetition")
Z = 1.96  # standard deviations of a 95% interval
DRAWS, BLOCK = 1000, 16  # of the bootstrap; tokens of text that are drawn together
SOLVED = 0.25  # of the original's answers, for a task to count
LEVEL, AHEAD, BEHIND = "level within noise", "**ahead**", "behind"
LABELS = {
    "our": "ours, as a conversion chooses",
    "damage": "ours, damage alone",
    "duo": "DuoAttention, kvpress' quick scores",
    "entropy": "attention entropy",
    "ablation": "our reading of 2602.11374, ablation",
    "layers": "our reading of 2512.20569, layers by KL",
    "gates": "our reading of DuoAttention's gates",
    "random": "random",
}
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


def recall_interval(a: Found, b: Found | None = None) -> tuple[float, float]:
    """95% interval of the mean over tasks; of a - b, question by question, where b is given; of no tasks, anything.

    Some tasks have a single question, so how much questions vary is taken from all of them together.
    """
    tasks = [task for task in a.recall if b is None or b.recall.get(task)]
    if not tasks:
        return -math.inf, math.inf
    pairs = [_paired(a.recall[task], None if b is None else b.recall[task]) for task in tasks]
    mean = statistics.mean(statistics.mean(values) for values in pairs)
    spread = statistics.pvariance([value for values in pairs for value in values])
    reach = Z * math.sqrt(spread * sum(1 / len(values) for values in pairs)) / len(pairs)
    return mean - reach, mean + reach


def divergence_interval(a: Found, b: Found | None = None, *, seed: int = 0) -> tuple[float, float]:
    """95% of the bootstrap's mean divergences, blocks of text drawn; of a - b where b is given."""
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
    ours = found.get(OURS)
    reference = ours if ours is not None and ours.divergence else found.get(ORIGINAL)  # ours must have read some text
    if reference is None:
        return {}
    asked, original = reference.contexts, found.get(ORIGINAL)
    solved = [task for task in TASKS if original is None or (original.task(task) or 0) >= SOLVED]
    return {name: restrict(each, asked, solved) for name, each in found.items() if each.contexts >= asked}


def restrict(found: Found, contexts: frozenset[Key], tasks: Sequence[str]) -> Found:
    """To these contexts, and to tasks that the original solves: of what it cannot do nothing can be lost."""

    def inside(values: dict[Key, float]) -> dict[Key, float]:
        return {key: value for key, value in values.items() if key[:3] in contexts}

    recall = {task: left for task in tasks if (left := inside(found.recall.get(task, {})))}
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
        cols = [name, f"{each.share:.0%}", "0" if name == ORIGINAL else f"{each.mean_divergence:.4f}"]
        cols += ["-" if (score := each.task(task)) is None else f"{score:.0%}" for task in tasks]
        cols.append(recalled(each.mean_recall, recall_interval(each)))
        if ours is None or each is ours or each is original:
            cols += ["", ""]
        else:
            cols.append(verdict(recall_interval(ours, each), more_is_better=True))
            cols.append(verdict(divergence_interval(ours, each), more_is_better=False))
        lines.append("| " + " | ".join(cols) + " |")
    return lines


def recalled(mean: float | None, interval: tuple[float, float]) -> str:
    low, high = (min(1.0, max(0.0, end)) for end in interval)
    return "-" if mean is None else f"{mean:.0%} ({low:.0%}-{high:.0%})"


def read_answers(folder: Path) -> list[dict]:
    return read_lines(folder / ANSWERS)


def document(options: argparse.Namespace) -> None:
    """Print the tables, or put them between the marks of a page (`--page docs/rivals.md`) with their picture beside."""
    rows = read_answers(options.output)
    parts = {
        "tables": tables([row for row in rows if not row["method"].startswith(CHOICE)]),
        "costs": costs(read_lines(options.output / COSTS)),
        "choices": choices(rows, options.output),
        "encoders": encoders(options.output),
    }
    if options.page is None:
        print("\n\n".join("\n".join(lines) for lines in parts.values()))
        return
    page = options.page.read_text(encoding="utf-8")
    for name, lines in parts.items():
        page = fill(page, name, lines)
    options.page.write_text(page, encoding="utf-8")
    picture(rows, options.output, options.page.parent / "images" / "heads-chosen.svg")


def fill(page: str, name: str, lines: list[str]) -> str:
    """What stands between the marks of this name is written anew."""
    first, last = f"<!-- {name}: written by benchmarks/rivals -->", f"<!-- end of {name} -->"
    if first not in page or last not in page:
        raise SystemExit(f"The page has no marks {first} and {last} to write {name} between")
    before, after = page.split(first)[0], page.split(last)[1]
    return before + "\n".join([first, *lines, last]) + after


def tables(rows: list[dict]) -> list[str]:
    lines = []
    for length in sorted({row["length"] for row in rows}):
        for budget in sorted({row["budget"] or 0 for row in rows if row["length"] == length} - {0}, reverse=True):
            found = cells(rows, length, budget)
            if len(found) < 2:
                continue
            some = next(iter(found.values()))
            asked = sum(len(answers) for answers in some.recall.values())
            lines += ["", f"### {length:,} tokens, {budget:.0%} of the cache", ""]
            lines.append(
                f"{len(some.contexts)} contexts, {asked} questions, {len(some.divergence) * BLOCK} tokens of text."
                + ("" if OURS in found else " Ours is not among them: not measured, or it cannot be made so small.")
            )
            lines += ["", *table(found)]
    return [*lines, ""]


def costs(rows: list[dict]) -> list[str]:
    if not rows:
        return ["", "Not measured yet.", ""]
    lines = ["", "| | tokens | prompt, s | a token, ms | peak memory, MB |", "|---|---|---|---|---|"]
    for row in sorted(rows, key=lambda row: row["length"]):
        peak = "-" if row.get("peak") is None else f"{row['peak'] / 1e6:,.0f}"
        cols = [row["method"], f"{row['length']:,}", f"{row['prompt']:.1f}", f"{1000 * row['token']:.0f}", peak]
        lines.append("| " + " | ".join(cols) + " |")
    return [*lines, ""]


def chosen(rows: list[dict], folder: Path) -> list[dict]:
    """One row for each score of heads and share kept."""
    found = []
    for name in dict.fromkeys(row["method"] for row in rows if row["method"].startswith(CHOICE)):
        seconds = (nearest_scores(folder, name.removeprefix(CHOICE), 0) or {"seconds": 0.0})["seconds"]
        for share in sorted({row["budget"] for row in rows if row["method"] == name}):
            each = gather(row for row in rows if row["method"] == name and row["budget"] == share)
            label = LABELS.get(name.removeprefix(CHOICE), name)
            cell = {"score": label, "share": share, "recall": each.mean_recall, "divergence": each.mean_divergence}
            found.append(cell | {"seconds": seconds, "interval": recall_interval(each), "contexts": each.contexts})
    most = max((len(cell["contexts"]) for cell in found), default=0)
    return [cell for cell in found if len(cell["contexts"]) == most]


def choices(rows: list[dict], folder: Path) -> list[str]:
    cells = chosen(rows, folder)
    if not cells:
        return ["", "Not measured yet.", ""]
    shares = sorted({cell["share"] for cell in cells})
    lines = ["", "| score of heads | CPU seconds | " + " | ".join(f"recall, {s:.0%} kept" for s in shares)]
    lines[-1] += " | " + " | ".join(f"KL, {s:.0%} kept" for s in shares) + " |"
    lines.append("|---" * (2 + 2 * len(shares)) + "|")
    for name in dict.fromkeys(cell["score"] for cell in cells):
        mine = {cell["share"]: cell for cell in cells if cell["score"] == name}
        if len(mine) < len(shares):
            continue
        cols = [name, f"{next(iter(mine.values()))['seconds']:.0f}"]
        cols += [recalled(mine[share]["recall"], mine[share]["interval"]) for share in shares]
        cols += [f"{mine[share]['divergence']:.3f}" for share in shares]
        lines.append("| " + " | ".join(cols) + " |")
    return [*lines, ""]


def encoders(folder: Path) -> list[str]:
    """How far embeddings turn, in thousandths of 1 - cosine, with the standard error."""
    path = folder / ENCODERS
    if not path.exists():
        return ["", "Not measured yet.", ""]
    rows = json.loads(path.read_text())["rows"]
    shares = sorted({row["share"] for row in rows})
    lines = ["", "| score of heads | CPU seconds | " + " | ".join(f"{share:.0%} kept" for share in shares) + " |"]
    lines.append("|---" * (2 + len(shares)) + "|")
    for name in dict.fromkeys(row["score"] for row in rows):
        mine = sorted((row for row in rows if row["score"] == name), key=lambda row: row["share"])
        cols = [LABELS[name], f"{sum(row['seconds'] for row in mine):.0f}"]
        cols += [f"{1000 * row['turned']:.2f} ± {1000 * row['error']:.2f}" for row in mine]
        lines.append("| " + " | ".join(cols) + " |")
    return [*lines, ""]


def picture(rows: list[dict], folder: Path, path: Path) -> None:
    from attngap.charts.files import save
    from attngap.charts.frame import altair
    from attngap.charts.frame import rows as data

    cells = chosen(rows, folder)
    if not cells:
        return
    alt = altair()
    for cell in cells:
        cell["score"] = f"{cell['score']} ({cell['seconds']:.0f} s)"
    base = alt.Chart(data(cells, ["score", "share", "recall", "divergence"])).mark_line(point=True)
    across = alt.X("share:Q", title="share of groups kept", scale=alt.Scale(type="log"), axis=alt.Axis(format="%"))
    color = alt.Color("score:N", title="score of heads")
    up = {"recall": alt.Axis(format="%"), "divergence": alt.Axis()}
    titles = {"recall": "mean recall", "divergence": "KL, nats a token"}
    charts = [
        base.encode(x=across, y=alt.Y(f"{name}:Q", title=titles[name], axis=axis), color=color).properties(
            width=320, height=260
        )
        for name, axis in up.items()
    ]
    save(alt.hconcat(*charts), path)
