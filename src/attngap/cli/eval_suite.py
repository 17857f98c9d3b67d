"""`attngap eval --suite`: recall over long contexts, a converted model beside its original, or any model alone."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attngap.longcontext.suite import Suite

RESULT, RECORD = "suite.json", "suite.jsonl"


def run(
    model: str, names: str, text: list[Path] | None, lengths: Sequence[int], examples: int, output: Path | None, seed: int
) -> "Suite":
    """Run the named tasks and write suite.json; what was answered is in suite.jsonl, from which a stopped run goes on."""
    from attngap.longcontext.suite import run_suite
    from attngap.models.texts import language_reference, read
    from attngap.provenance import provenance
    from attngap.storage.files import write_text

    models, tokenizer = _models(model)
    folder = output or (Path(model) if (Path(model) / "attngap.json").exists() else None)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    found = run_suite(
        models,
        tokenizer,
        "\n\n".join(read(text) if text else language_reference()),
        lengths=lengths,
        tasks=[] if names == "all" else names.split(","),
        examples=examples,
        seed=seed,
        record=None if folder is None else folder / RECORD,
    )
    found.provenance = provenance()
    if folder is not None:
        write_text(folder / RESULT, found.model_dump_json(by_alias=True, indent=1) + "\n")
        (folder / RECORD).unlink(missing_ok=True)
    return found


def _models(name: str) -> tuple[dict[str, Any], Any]:
    from attngap.models.load import load
    from attngap.models.save import load_base, read_record

    model, tokenizer = load(name)
    if not (Path(name) / "attngap.json").exists():
        return {"original": model.eval()}, tokenizer
    original, _ = load_base(Path(name), read_record(Path(name)))
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
    Console().print(table)


def _rows(suite: "Suite") -> list[list[Any]]:
    step = len(suite.models)
    return [suite.scores[i : i + step] for i in range(0, len(suite.scores), step)]
