"""`attngap linearize`: replace the heads that do not need softmax, with a receipt."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attngap.cli import complete
from attngap.cli.placement import DEVICE, DTYPE, Device, Dtype, MaxMemory, placed
from attngap.conversion.options import ConversionOptions
from attngap.errors import AttngapError
from attngap.options import KEEP

if TYPE_CHECKING:
    from attngap.conversion.receipt import Receipt
    from attngap.models.plan import Plan


def _help(name: str) -> Any:
    return typer.Option(help=ConversionOptions.help(name))


def _planned(name: str, complete: Callable[[str], Any] | None = None) -> Any:
    """An option that a plan decides where it is not given."""
    told = f"{ConversionOptions.help(name)} Default: {ConversionOptions.default(name)}, or the plan's."
    return typer.Option(help=told, autocompletion=complete)


def _default(name: str) -> Any:
    return ConversionOptions.default(name)


def linearize(
    model: Annotated[str, typer.Argument(help="A Hugging Face folder or id, a .gguf file, smollm2 or minilm.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder for the converted model.")],
    plan: Annotated[Path | None, typer.Option(help="Written by `attngap plan`.")] = None,
    diagnosis: Annotated[
        Path | None, typer.Option(help="Written by `attngap diagnose`: keep the heads it finds most important.")
    ] = None,
    keep: Annotated[float | None, _planned("keep")] = None,
    max_ppl_ratio: Annotated[float | None, _help("max_ppl_ratio")] = None,
    max_ppl_length: Annotated[int | None, _help("max_ppl_length")] = None,
    granularity: Annotated[str | None, _planned("granularity")] = None,
    text: Annotated[list[Path] | None, typer.Option(help="Text file; repeat it. Default: Python's manual.")] = None,
    mechanism: Annotated[str | None, _planned("mechanism", complete.mechanisms)] = None,
    window: Annotated[int | None, _planned("window")] = None,
    even_windows: Annotated[bool, typer.Option("--even-windows", help=ConversionOptions.help("even_windows"))] = False,
    held: Annotated[float, _help("held")] = _default("held"),
    sinks: Annotated[int | None, _planned("sinks")] = None,
    context: Annotated[int, _help("context")] = _default("context"),
    tokens: Annotated[int, _help("tokens")] = _default("tokens"),
    length: Annotated[int | None, _help("length")] = _default("length"),
    steps: Annotated[int, _help("steps")] = _default("steps"),
    joint: Annotated[int, _help("joint")] = _default("joint"),
    rounds: Annotated[int, _help("rounds")] = _default("rounds"),
    lora: Annotated[int, _help("lora")] = _default("lora"),
    seed: Annotated[int, _help("seed")] = _default("seed"),
    dtype: Dtype = DTYPE,
    device: Device = DEVICE,
    max_memory: MaxMemory = None,
    ray: Annotated[str | None, typer.Option(help="Fit layers on a Ray cluster: host:port, auto or local.")] = None,
    full: Annotated[bool, typer.Option("--full", help="Write the base model too.")] = False,
    measure: Annotated[
        bool, typer.Option("--measure/--no-measure", help="Write a receipt; `attngap eval` does it later.")
    ] = True,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the model in the folder.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the receipt as JSON on stdout.")] = False,
) -> None:
    """Replace the heads that do not need softmax and say what that costs and gains.

    A group is the heads that share a key head. Its cache is dropped only when all of them are replaced, so heads are
    kept by whole groups; --granularity head keeps the same number wherever they matter most. The model is saved before
    it is measured. Started again with the same arguments, a killed run goes on where it stopped.

    \b
    Examples:
      attngap linearize smollm2 --keep 0.1 -o fast
      attngap linearize smollm2 --plan plan.json -o fast
    """
    _check_choice(plan, diagnosis, keep, max_ppl_ratio)
    given = {"keep": keep, "max_ppl_ratio": max_ppl_ratio, "max_ppl_length": max_ppl_length}
    given |= {"granularity": granularity}
    given |= {"mechanism": mechanism, "window": window, "sinks": sinks, "context": context, "tokens": tokens}
    given |= {"even_windows": even_windows or None, "held": held}
    given |= {"length": length, "steps": steps, "joint": joint, "rounds": rounds, "lora": lora, "seed": seed}
    options = ConversionOptions(**{name: value for name, value in given.items() if value is not None})
    from attngap.storage.folder import check_output

    check_output(output, "attngap.json", "converted model", overwrite=overwrite)
    from attngap.conversion.linearize import linearize as run
    from attngap.costs.room import check_room
    from attngap.engine.cluster import check_address
    from attngap.heads.passages import read
    from attngap.models.load import load
    from attngap.models.plan import Plan
    from attngap.ops.pages import keep_freed

    keep_freed()
    where = placed(dtype, device, max_memory)
    if ray is not None:  # before minutes of loading
        check_address(ray)
    check_room(model, options, **where)
    documents = read(text) if text else None
    chosen = None if plan is None else Plan.load(plan)
    if diagnosis is not None:
        chosen, options = _diagnosed(diagnosis, options)
    loaded, tokenizer = load(model, **where)
    _, receipt = run(
        loaded,
        tokenizer,
        chosen,
        documents,
        options=options,
        measured=measure,
        directory=output,
        overwrite=overwrite,
        full=full,
        name=model,
        ray=ray,
        quiet=False,
    )
    if as_json:
        print(receipt.model_dump_json(by_alias=True))
    else:
        show(receipt, output)


def _diagnosed(folder: Path, options: ConversionOptions) -> "tuple[Plan, ConversionOptions]":
    """The heads that a diagnosis finds most important, as a plan; how many is then decided."""
    from attngap.diagnosis.result import Diagnosis

    made = Diagnosis.load(folder).plan(KEEP if options.keep is None else options.keep, options.granularity)
    return made, options.but(keep=None)


def _check_choice(plan: Path | None, diagnosis: Path | None, keep: float | None, max_ppl_ratio: float | None) -> None:
    if plan is not None and keep is not None:
        raise AttngapError("--plan and --keep both say which heads to keep. Give one of them")
    if plan is not None and diagnosis is not None:
        raise AttngapError("--plan and --diagnosis both say which heads to keep. Give one of them")
    if diagnosis is not None and max_ppl_ratio is not None:
        raise AttngapError("--diagnosis and --max-ppl-ratio both say which heads to keep. Give one of them")
    if keep is not None and max_ppl_ratio is not None:
        raise AttngapError("--keep and --max-ppl-ratio both say how many heads to keep. Give one of them")


def show(receipt: "Receipt", output: Path) -> None:
    """The receipt, and what to do next."""
    from attngap.conversion.card import writes_text
    from attngap.models.save import read_record

    receipt.show()
    if not receipt.quality:
        typer.echo(f"Not measured. Measure it: attngap eval {output}")
    if writes_text(read_record(output)):
        typer.echo(f"Try it: attngap generate {output} 'Once upon a time'")
