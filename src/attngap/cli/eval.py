"""`attngap eval`: measure a converted model again, at length, or on tasks of lm-evaluation-harness."""

import dataclasses
import hashlib
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attngap.cli.placement import DEVICE, DTYPE, Device, Dtype, placed
from attngap.errors import AttngapError, missing_extra

if TYPE_CHECKING:
    from attngap.conversion.evaluate import Measures

SUITE_LENGTHS = "1024,4096"


def evaluate(
    directory: Annotated[Path, typer.Argument(help="Folder written by `attngap linearize`; any model for --suite.")],
    text: Annotated[list[Path] | None, typer.Option(help="Text to evaluate on; repeat it.")] = None,
    passages: Annotated[int, typer.Option(help="Passages of held-out text.")] = 4,
    trials: Annotated[int, typer.Option(help="Induction sequences, and needles a place.")] = 2,
    contexts: Annotated[str, typer.Option(help="For speed and memory.")] = "1024,4096,8192,16384",
    prefill_up_to: Annotated[int, typer.Option(help="Longest prompt to time; minutes on a CPU at 16k.")] = 4096,
    lm_eval: Annotated[str | None, typer.Option(help="A task of lm-evaluation-harness, or its .yaml.")] = None,
    limit: Annotated[int | None, typer.Option(help="Examples a task, for --lm-eval.")] = None,
    suite: Annotated[str | None, typer.Option(help="Long-context tasks with commas between, or `all`.")] = None,
    lengths: Annotated[
        str | None, typer.Option(help="For quality, each part. Default: 1024,4096,8192; for --suite 1024,4096.")
    ] = None,
    examples: Annotated[int, typer.Option(help="Contexts per task and length, for --suite.")] = 4,
    seed: Annotated[int, typer.Option(help="Of what --suite asks.")] = 0,
    export: Annotated[Path | None, typer.Option(help="Write the suite for lm-evaluation-harness instead.")] = None,
    dtype: Dtype = DTYPE,
    device: Device = DEVICE,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")] = False,
) -> None:
    """Measure quality, recall, speed and memory beside the original and the baselines.

    The figures of a conversion that was not measured yet become its receipt's own. Any others are added to the receipt
    with their date and the hash of their text; nothing that stands there is overwritten. The folder's README follows.

    \b
    Examples:
      attngap eval fast --text speech.txt
      attngap eval fast --suite needle,lookup --lengths 2048
      attngap eval fast --lm-eval task.yaml --limit 100
    """
    if suite is not None:
        from attngap.cli import eval_suite

        wanted = parse_contexts(lengths or SUITE_LENGTHS)
        where = placed(dtype, device)
        eval_suite.main(str(directory), suite, text, wanted, examples, seed, export, as_json, where)
        return
    if not (directory / "attngap.json").exists():
        raise AttngapError(f"No converted model in '{directory}'. Write one: attngap linearize MODEL -o {directory}")
    if lm_eval is not None:
        harness(directory, lm_eval, limit, as_json, placed(dtype, device))
        return
    from attngap.conversion.evaluate import Measures

    measures = Measures(
        passages=passages,
        trials=trials,
        by_length=parse_contexts(lengths) if lengths else Measures.by_length,
        contexts=parse_contexts(contexts),
        prefill_up_to=prefill_up_to,
        repetition=True,
    )
    _measure(directory, measures, text, as_json, placed(dtype, device))


def _measure(
    directory: Path, measures: "Measures", text: list[Path] | None, as_json: bool, where: dict[str, Any]
) -> None:
    """Measure, and write receipt and card."""
    from attngap.cli.linearize import show
    from attngap.conversion.card import model_card
    from attngap.conversion.evaluate import far_part_of, measure
    from attngap.conversion.receipt import FILE, Receipt, unmeasured_receipt
    from attngap.heads.passages import language_reference, read
    from attngap.models.load import load
    from attngap.models.save import CARD, load_base, read_record
    from attngap.provenance import provenance
    from attngap.storage.files import write_text

    conversion = read_record(directory)
    receipt = Receipt.load(directory) if (directory / FILE).exists() else unmeasured_receipt(conversion)
    documents = read(text) if text else None
    original, tokenizer = load_base(directory, conversion, **where)
    converted, _ = load(directory, **where)
    chosen = dataclasses.replace(measures, text=documents)
    figures = measure(original, converted, tokenizer, None, chosen, context=receipt.options["context"])
    named = ", ".join(path.name for path in text) if text else "Python's manual, its held-out part"
    digest = hashlib.sha256("\n\n".join(documents or language_reference()).encode()).hexdigest()
    far_part = far_part_of(converted)
    if receipt.quality:
        made = provenance(seed=chosen.seed, model=receipt.model, far_part=far_part)
        updated = receipt.with_entry(figures, text=named, text_sha256=digest, made=made)
    else:
        named_now = receipt.model_copy(update={"provenance": receipt.provenance | {"far_part": far_part}})
        updated = named_now.with_figures(figures, note=f"measured later on {named} (sha256 {digest[:16]})")
    updated.save(directory)
    write_text(directory / CARD, model_card(updated, conversion))
    if as_json:
        print(updated.model_dump_json(by_alias=True))
    else:
        show(updated, directory)


def parse_contexts(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise AttngapError(f"A list of lengths is whole numbers with commas between, got {text!r}") from None


def harness(directory: Path, task: str, limit: int | None, as_json: bool, where: dict[str, Any]) -> None:
    """Original and converted model on one task, side by side."""
    if importlib.util.find_spec("lm_eval") is None:
        raise missing_extra("--lm-eval needs", "eval")
    from attngap.models.load import load
    from attngap.models.save import load_base, read_record

    original, tokenizer = load_base(directory, read_record(directory), **where)
    converted, _ = load(directory, **where)
    found = {name: _run(model, tokenizer, task, limit) for name, model in _pair(original, converted)}
    if as_json:
        import json

        print(json.dumps(found))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"lm-evaluation-harness: {task}")
    for name in ("metric", "original", "converted"):
        table.add_column(name)
    for metric, value in found["original"].items():
        table.add_row(metric, f"{value:.4f}", f"{found['converted'].get(metric, float('nan')):.4f}")
    Console(markup=False).print(table)


def _pair(original: Any, converted: Any) -> list[tuple[str, Any]]:
    return [("original", original), ("converted", converted)]


def _run(model: Any, tokenizer: Any, task: str, limit: int | None) -> dict[str, float]:
    """The task's numbers; a .yaml file is a task of its own, with its data wherever it says, offline included."""
    lm_eval: Any = importlib.import_module("lm_eval")
    wrap = importlib.import_module("lm_eval.models.huggingface").HFLM
    manager_class = importlib.import_module("lm_eval.tasks").TaskManager

    path = Path(task)
    if path.suffix in (".yaml", ".yml"):
        if not path.exists():
            raise AttngapError(f"No task file '{task}'. Give a .yaml file, or a task's name")
        import yaml

        name = yaml.safe_load(path.read_text(encoding="utf-8"))["task"]
        manager = manager_class(include_path=str(path.parent))
    else:
        name, manager = task, manager_class()
    results: Any = lm_eval.simple_evaluate(
        model=wrap(pretrained=model, tokenizer=tokenizer), tasks=[name], limit=limit, task_manager=manager
    )
    numbers = results["results"][name]
    return {key.split(",")[0]: float(value) for key, value in numbers.items() if isinstance(value, int | float)}
