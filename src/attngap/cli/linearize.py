"""`attngap linearize`: replace the heads that do not need softmax, with a receipt."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attngap.cli import complete
from attngap.cli.plan import read_granularity
from attngap.errors import AttngapError

if TYPE_CHECKING:
    from attngap.conversion.receipt import Receipt


# Wide, because exact keys nearby bought more quality for their memory than features did (docs/results.md): at 16k
# tokens 256 of them and their features are 3.6% of a head's cache. A plan made from a diagnosis says its own.
WINDOW, SINKS = 256, 4


def linearize(
    model: Annotated[str, typer.Argument(help="A Hugging Face folder or id, a .gguf file, smollm2 or minilm.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder for the converted model.")],
    plan: Annotated[Path | None, typer.Option(help="Written by `attngap plan`.")] = None,
    keep: Annotated[float | None, typer.Option(help="Share of heads to keep, those it hurts most to replace.")] = None,
    max_ppl_ratio: Annotated[float | None, typer.Option(help="Keep as few heads as this ratio allows.")] = None,
    granularity: Annotated[
        str, typer.Option(help="Without a plan: keep whole groups of heads, or single ones: group, head.")
    ] = "group",
    text: Annotated[list[Path] | None, typer.Option(help="Text file; repeat it. Default: Python's manual.")] = None,
    mechanism: Annotated[
        str | None,
        typer.Option(help="Feature map; with --window 0 any mechanism.", autocompletion=complete.mechanisms),
    ] = None,
    window: Annotated[int | None, typer.Option(help="Last keys kept exact; default: the plan's, or 256.")] = None,
    sinks: Annotated[int | None, typer.Option(help="First keys kept exact.")] = None,
    context: Annotated[int, typer.Option(help="Tokens a passage; features are read no farther.")] = 1024,
    tokens: Annotated[int, typer.Option(help="Calibration tokens.")] = 20480,
    steps: Annotated[int, typer.Option(help="Steps of fitting each layer.")] = 30,
    joint: Annotated[int, typer.Option(help="Steps of fitting all layers together.")] = 12,
    rounds: Annotated[int, typer.Option(help="Rounds of choosing kept heads.")] = 2,
    lora: Annotated[int, typer.Option(help="Rank of LoRA; 0 for none.")] = 0,
    seed: Annotated[int, typer.Option(help="Chooses passages and order.")] = 0,
    ray: Annotated[str | None, typer.Option(help="Fit layers on a Ray cluster: host:port, auto or local.")] = None,
    full: Annotated[bool, typer.Option("--full", help="Write the base model too.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the model in the folder.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the receipt as JSON on stdout.")] = False,
) -> None:
    """Replace the heads that do not need softmax and say what that costs and gains.

    A group is the heads that share a key head. Its cache is dropped only when all of them are replaced, so heads are
    kept by whole groups; --granularity head keeps the same number wherever they matter most. Started again with the
    same arguments, a killed run goes on where it stopped.

    Examples: attngap linearize smollm2 --keep 0.1 -o fast, attngap linearize smollm2 --plan plan.json -o fast
    """
    _check_choice(plan, keep, max_ppl_ratio)
    units = read_granularity(granularity)
    check_folder(output, overwrite)
    from attngap.conversion.linearize import bare_plan
    from attngap.conversion.linearize import linearize as run
    from attngap.heads.passages import read
    from attngap.models.load import load
    from attngap.models.plan import Plan, Replacement
    from attngap.ops.pages import keep_freed
    from attngap.storage.checkpoint import PIECES

    keep_freed()
    documents = read(text) if text else None
    chosen = None if plan is None else Plan.load(plan)
    loaded, tokenizer = load(model)
    if chosen is None:
        window, sinks = WINDOW if window is None else window, SINKS if sinks is None else sinks
        chosen = bare_plan(loaded, model, Replacement(window=window or 1, sinks=sinks), units)
    converted, receipt = run(
        loaded,
        tokenizer,
        chosen,
        documents,
        mechanism=mechanism,
        window=window,
        sinks=sinks,
        context=context,
        tokens=tokens,
        steps=steps,
        joint=joint,
        rounds=rounds,
        keep=keep,
        max_ppl_ratio=max_ppl_ratio,
        lora=lora,
        seed=seed,
        work=output / PIECES,
        ray=ray,
        quiet=False,
    )
    from attngap.conversion.card import model_card
    from attngap.models.save import record, save

    original = loaded if full else None
    save(converted, output, tokenizer=tokenizer, original=original, card=model_card(receipt, record(converted)))
    receipt.save(output)
    if as_json:
        print(receipt.model_dump_json(by_alias=True))
    else:
        show(receipt, output)


def _check_choice(plan: Path | None, keep: float | None, max_ppl_ratio: float | None) -> None:
    if plan is None and keep is None and max_ppl_ratio is None:
        raise AttngapError("Say which heads to keep: --plan plan.json, --keep 0.1 or --max-ppl-ratio 1.02")
    if plan is not None and keep is not None:
        raise AttngapError("--plan and --keep both say which heads to keep. Give one of them")
    if keep is not None and max_ppl_ratio is not None:
        raise AttngapError("--keep and --max-ppl-ratio both say how many heads to keep. Give one of them")
    if keep is not None and not 0 <= keep <= 1:
        raise AttngapError(f"--keep takes a share from 0 to 1, got {keep}. For a tenth of the heads: --keep 0.1")


def check_folder(output: Path, overwrite: bool) -> None:
    """A folder that holds something else is left alone; one with unfinished work is gone on with."""
    from attngap.storage.checkpoint import PIECES, claimed

    if (output / "attngap.json").exists() and not overwrite:
        raise AttngapError(f"'{output}' already holds a converted model. Choose another folder, or pass --overwrite")
    ours = claimed(output / PIECES) or (output / "attngap.json").exists()
    if output.is_dir() and any(output.iterdir()) and not ours:
        raise AttngapError(f"'{output}' is not empty and not a converted model. Choose another folder")


def show(receipt: "Receipt", output: Path) -> None:
    """The receipt, and what to do next."""
    receipt.show()
    typer.echo(f"Try it: attngap generate {output} 'Once upon a time'")
