"""Every task at every length for a model and its conversion, on the same tokens, and what is kept of the original."""

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from attngap.errors import AttngapError
from attngap.longcontext.scoring import answer, answer_blind, difference, wilson
from attngap.longcontext.tasks import TASKS, Task, task
from attngap.longcontext.writing import Example, Writer
from attngap.progress import progress
from attngap.storage.files import write_text

SCHEMA = "attngap.suite/1"
Answers = dict[str, list[float]]  # by model, and the first one's without the context under BLIND
BLIND = "without context"


class Row(BaseModel):
    """A line of a record: one example."""

    model_config = ConfigDict(extra="forbid", strict=True)
    key: str
    answers: Answers


class Score(BaseModel):
    """One model on one task at one length. `verdict` compares with the first model, by intervals."""

    model_config = ConfigDict(extra="forbid")
    task: str
    length: int
    model: str
    questions: int
    score: float  # share of the answers' tokens
    low: float  # of a 95% interval
    high: float
    chance: float  # the first model's score without the context
    kept: float | None = None  # share of the first model's score; None for itself and where it scores nothing
    verdict: Literal["", "worse", "better", "level within noise"] = ""


class Suite(BaseModel):
    """All scores of one run."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)
    schema_: Literal["attngap.suite/1"] = Field(default=SCHEMA, alias="schema")
    models: list[str]
    examples: int
    seed: int
    scores: list[Score]
    provenance: dict[str, Any] = {}


def run_suite(
    models: Mapping[str, PreTrainedModel],
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    *,
    lengths: Sequence[int],
    tasks: Sequence[str] = (),
    examples: int = 4,
    seed: int = 0,
    record: Path | None = None,
    quiet: bool = False,
) -> Suite:
    """Ask every model the same questions; `record` is a file of finished examples from which a stopped run goes on.

    All tasks are run unless some are named. The first model is the one that others are compared with.
    """
    chosen = [task(name) for name in tasks] or list(TASKS)
    for model in models.values():
        _check_lengths(model, lengths)
    if examples < 1:
        raise AttngapError(f"The suite needs at least 1 example per task, got {examples}")
    finished = _read(record, {"models": list(models), "seed": seed, "text": _digest(text)})
    scores = []
    with progress("long-context suite", len(chosen) * len(lengths) * examples, quiet=quiet) as advance:
        for length in lengths:
            for each in chosen:
                answers: list[Answers] = []
                for i in range(examples):
                    key = f"{each.name}/{length}/{i}"
                    if key not in finished:
                        finished[key] = _ask(models, make(each, tokenizer, text, length, f"{seed}/{key}"))
                        _append(record, {"key": key, "answers": finished[key]})
                    answers.append(finished[key])
                    advance(note=key)
                scores += _scores(each.name, length, list(models), answers)
    return Suite(models=list(models), examples=examples, seed=seed, scores=scores)


def make(each: Task, tokenizer: PreTrainedTokenizerBase, text: str, length: int, seed: str) -> Example:
    """The example of this seed: the same on every machine with the same tokenizer and text."""
    return each.build(Writer(tokenizer, text, length, random.Random(seed)))


def _ask(models: Mapping[str, PreTrainedModel], example: Example) -> Answers:
    found = {name: answer(model, example) for name, model in models.items()}
    return found | {BLIND: answer_blind(next(iter(models.values())), example)}


def _scores(name: str, length: int, models: list[str], answers: list[Answers]) -> list[Score]:
    mean = {model: _mean([one[model] for one in answers]) for model in (*models, BLIND)}
    count = sum(len(one[models[0]]) for one in answers)
    first, rows = mean[models[0]], []
    for model in models:
        interval, score = wilson(mean[model], count), mean[model]
        row = Score(
            task=name,
            length=length,
            model=model,
            questions=count,
            score=score,
            low=interval.low,
            high=interval.high,
            chance=mean[BLIND],
        )
        if model != models[0]:
            apart = difference(score, first, count)
            row.kept = score / first if first else None
            row.verdict = "worse" if apart.high < 0 else "better" if apart.low > 0 else "level within noise"
        rows.append(row)
    return rows


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]


def _mean(shares: list[list[float]]) -> float:
    flat = [share for example in shares for share in example]
    return sum(flat) / len(flat)


def _check_lengths(model: PreTrainedModel, lengths: Sequence[int]) -> None:
    config: Any = model.config.get_text_config()
    most = getattr(config, "max_position_embeddings", None)
    if model.get_output_embeddings() is None or not model.can_generate():
        raise AttngapError(f"The long-context suite needs a causal language model, got {type(model).__name__}")
    for length in lengths:
        if most is not None and length > most:
            raise AttngapError(f"A length of {length} is beyond this model's {most} positions. Give a shorter one")


def _read(record: Path | None, key: dict[str, Any]) -> dict[str, Answers]:
    """Finished examples of an earlier run with the same models, text and seed; lines from a damaged one on are lost."""
    if record is None:
        return {}
    if not record.exists():
        _append(record, key)
        return {}
    if not record.is_file():  # opening a pipe would wait for ever
        raise AttngapError(f"'{record}' is not a file. Choose another one")
    found: dict[str, Answers] = {}
    try:
        first, *lines = record.read_text(encoding="utf-8", errors="replace").splitlines() or [""]
        if json.loads(first) != key:
            raise ValueError
    except OSError as error:
        raise AttngapError(f"Cannot read '{record}': {error.strerror}. Choose another file") from error
    except (ValueError, RecursionError):
        raise AttngapError(
            f"'{record}' holds a suite of other models, text or seed. Choose another file, or remove it"
        ) from None
    for line in lines:
        try:
            row = Row.model_validate_json(line)
        except ValidationError:
            _write(record, [key, *({"key": name, "answers": answers} for name, answers in found.items())])
            break
        found[row.key] = row.answers
    return found


def _write(record: Path, rows: Sequence[dict[str, Any]]) -> None:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    write_text(record, text, hint="Make room and run the same command again")


def _append(record: Path | None, row: dict[str, Any]) -> None:
    if record is None:
        return
    try:
        with record.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    except OSError as error:
        raise AttngapError(f"Cannot write '{record}': {error}. Make room and run the same command again") from error


def load_suite(path: Path) -> Suite:
    if path.exists() and not path.is_file():  # opening a pipe would wait for ever
        raise AttngapError(f"Cannot read the suite '{path}': it is not a file")
    try:
        return Suite.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValidationError, UnicodeDecodeError) as error:
        raise AttngapError(f"Cannot read the suite '{path}': {str(error).splitlines()[0]}") from error
