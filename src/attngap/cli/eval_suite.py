"""`attngap eval --suite`: recall over long contexts, a converted model beside its original, or any model alone."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attngap.longcontext.suite import Suite

RESULT, RECORD = "suite.json", "suite.jsonl"


def main(
    model: str,
    tasks: str,
    text: list[Path] | None,
    lengths: Sequence[int],
    examples: int,
    seed: int,
    export: Path | None,
    as_json: bool,
    where: dict[str, Any] | None = None,
) -> None:
    """Run the tasks and show their scores, or write them for lm-evaluation-harness."""
    from attngap.heads.passages import language_reference, read

    names = [] if tasks == "all" else tasks.split(",")
    filler = "\n\n".join(read(text) if text else language_reference())
    if export is not None:
        _export(model, names, filler, lengths, examples, seed, export)
        return
    found = run(model, names, filler, lengths, examples, seed, **(where or {}))
    print(found.model_dump_json(by_alias=True)) if as_json else show(found)


def run(
    model: str, tasks: list[str], text: str, lengths: Sequence[int], examples: int, seed: int, **where: Any
) -> "Suite":
    """Run the tasks; in a converted folder leave suite.json, and what was answered so far while it runs."""
    from attngap.longcontext.suite import run_suite
    from attngap.provenance import provenance
    from attngap.storage.files import write_text

    models, tokenizer = _models(model, where)
    folder = Path(model) if len(models) > 1 else None
    record = None if folder is None else folder / RECORD
    options = {"lengths": lengths, "tasks": tasks, "examples": examples, "seed": seed}
    found = run_suite(models, tokenizer, text, record=record, **options)
    found.provenance = provenance()
    if folder is not None and record is not None:
        write_text(folder / RESULT, found.model_dump_json(by_alias=True, indent=1) + "\n")
        record.unlink()
    return found


def _export(
    model: str, tasks: list[str], text: str, lengths: Sequence[int], examples: int, seed: int, folder: Path
) -> None:
    from attngap.longcontext.harness import export_tasks
    from attngap.models.load import load

    _, tokenizer = load(model)
    for length in lengths:
        for path in export_tasks(folder, tokenizer, text, length=length, tasks=tasks, examples=examples, seed=seed):
            print(f"lm_eval --include_path {folder} --tasks {path.stem}")


def _models(name: str, where: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    from attngap.models.load import load
    from attngap.models.save import load_base, read_record

    model, tokenizer = load(name, **where)
    if not (Path(name) / "attngap.json").exists():
        return {"original": model.eval()}, tokenizer
    original, _ = load_base(Path(name), read_record(Path(name)), **where)
    return {"original": original.eval(), "converted": model.eval()}, tokenizer


def show(suite: "Suite") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Long contexts: share of the answers' tokens (95% interval)")
    for name in ("task", "tokens", "chance", *suite.models, "kept", ""):
        table.add_column(name, justify="left" if name in ("task", "") else "right")
    for first, *others in _rows(suite):
        cells = [f"{row.score:.0%} ({row.low:.0%}-{row.high:.0%})" for row in (first, *others)]
        last = others[-1] if others else None
        kept = "" if last is None or last.kept is None else f"{last.kept:.0%}"
        table.add_row(first.task, str(first.length), f"{first.chance:.0%}", *cells, kept, last.verdict if last else "")
    Console(markup=False).print(table)


def _rows(suite: "Suite") -> list[list[Any]]:
    step = len(suite.models)
    return [suite.scores[i : i + step] for i in range(0, len(suite.scores), step)]
