"""`attngap diagnose`: which heads of a model need softmax, and why."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attngap.cli.placement import DEVICE, DTYPE, Device, Dtype, MaxMemory, placed
from attngap.diagnosis.options import DiagnosisOptions
from attngap.errors import AttngapError

if TYPE_CHECKING:
    from attngap.diagnosis.result import Diagnosis, Head

SHOWN = 20  # heads in the table; all of them are in the folder


def _help(name: str) -> Any:
    return typer.Option(help=DiagnosisOptions.help(name))


def _default(name: str) -> Any:
    return DiagnosisOptions.default(name)


def diagnose(
    model: Annotated[
        str, typer.Argument(help="A Hugging Face folder or id, a .gguf file, a converted folder, smollm2, minilm.")
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder for the result.")],
    text: Annotated[list[Path] | None, typer.Option(help="Text file; repeat it. Default: Python's manual.")] = None,
    context: Annotated[int, _help("context")] = _default("context"),
    passages: Annotated[int, _help("passages")] = _default("passages"),
    ranks: Annotated[str, _help("ranks")] = ",".join(map(str, _default("ranks"))),
    window: Annotated[int, _help("window")] = _default("window"),
    sinks: Annotated[int, _help("sinks")] = _default("sinks"),
    quick: Annotated[bool, typer.Option("--quick", help=DiagnosisOptions.help("quick"))] = False,
    verify: Annotated[int, _help("verify")] = _default("verify"),
    draws: Annotated[int, _help("draws")] = _default("draws"),
    seed: Annotated[int, _help("seed")] = _default("seed"),
    dtype: Dtype = DTYPE,
    device: Device = DEVICE,
    max_memory: MaxMemory = None,
    ray: Annotated[
        str | None, typer.Option(help="Look at passages and layers on a Ray cluster: host:port, auto or local.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the result in the folder.")] = False,
    allow_pickle: Annotated[bool, typer.Option("--allow-pickle", help="Load weights that can run code.")] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the diagnosis as JSON on stdout.")] = False,
) -> None:
    """Say of every attention head whether it needs softmax, why, and what replacing it would cost.

    Started again with the same arguments, a killed run goes on where it stopped.

    \b
    Examples:
      attngap diagnose smollm2 -o diagnosis
      attngap diagnose gpt2 --text notes.txt --quick -o quick
    """
    options = DiagnosisOptions(
        context=context,
        passages=passages,
        ranks=tuple(parse_ranks(ranks)),
        window=window,
        sinks=sinks,
        quick=quick,
        verify=verify,
        draws=draws,
        seed=seed,
    )
    from attngap.storage.folder import check_output

    check_output(output, "diagnosis.json", "diagnosis", overwrite=overwrite)
    from attngap.costs.room import check_room
    from attngap.diagnosis.diagnose import diagnose as run
    from attngap.diagnosis.tasks import check_sendable
    from attngap.engine.cluster import check_address
    from attngap.heads.passages import read
    from attngap.models.load import load

    where = placed(dtype, device, max_memory)
    if ray is not None:  # before minutes of loading
        check_sendable(where["device"], on_disk=max_memory is not None)
        check_address(ray)
    check_room(model, options, **where)
    documents = read(text) if text else None
    loaded, tokenizer = load(model, allow_pickle=allow_pickle, trust_remote_code=trust_remote_code, **where)
    result = run(
        loaded,
        tokenizer,
        documents,
        options=options,
        directory=output,
        overwrite=overwrite,
        name=model,
        ray=ray,
        quiet=False,
    )
    if as_json:
        print(result.model_dump_json(by_alias=True))
    else:
        show(result, output)


def parse_ranks(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise AttngapError(f"--ranks takes whole numbers with commas between, such as 8,16,64; got {text!r}") from None


def show(result: "Diagnosis", output: Path) -> None:
    """The heads that matter most, then what the whole comes to."""
    from rich.console import Console

    console = Console(markup=False)
    console.print(_table(result))
    for line in summary(result):
        console.print(line, highlight=False)
    pictured = "" if result.rank is None else f", then: attngap plan {output} --keep 0.1 -o plan.json"
    console.print(f"All {len(result.heads)} heads are in {output}{pictured}", highlight=False, soft_wrap=True)


def _table(result: "Diagnosis") -> Any:
    from rich import box
    from rich.table import Table

    quick = result.rank is None
    table = Table(title=f"{result.model.name}: {len(result.heads)} heads", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    names = ["head", "sink", "near", "far", "κ"]
    names += [] if quick else [f"floor@{result.rank}", "damage", "recall"]
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("verdict", "kind"):
        table.add_column(name, no_wrap=True)
    for head in ranked(result)[:SHOWN]:
        cells = [head.id, f"{head.sink:.0%}", f"{head.near:.0%}", f"{head.far:.0%}", _fixed(head.kappa)]
        if not quick:
            cells += [_percent(head.floor), _number(head.damage), _number(head.recall_damage)]
        table.add_row(*cells, head.verdict, head.kind)
    return table


def ranked(result: "Diagnosis") -> "list[Head]":
    """The most important first; without damage, the most retrieving."""
    return sorted(result.heads, key=lambda head: (-(head.importance or 0.0), -(head.induction or 0.0), -head.far))


def summary(result: "Diagnosis") -> list[str]:
    """A few sentences: how concentrated the damage is, how much is unavoidable, whether the estimate holds."""
    counts = {name: sum(head.verdict == name for head in result.heads) for name in ("keep", "replace", "window")}
    linear = sum(head.verdict == "linear" for head in result.heads)
    lines = [
        f"{counts['keep']} heads to keep, {counts['replace']} to replace, {counts['window']} that need a window only"
        + (f"; {linear} are linear already." if linear else ".")
    ]
    lines += [line for kind in ("text", "recall") if (line := _concentration(result, kind))]
    if (check := result.verification) is not None and check.spearman is not None:
        lines.append(
            f"Verified on {check.passages} held-out passages: rank correlation of estimated and real damage over "
            f"{len(check.heads)} heads is {check.spearman:.2f}"
            + ("." if check.recall_spearman is None else f", on another stress passage {check.recall_spearman:.2f}.")
        )
    return lines


def _concentration(result: "Diagnosis", kind: str) -> str:
    prefix = "recall_" if kind == "recall" else ""
    pairs = [(getattr(head, f"{prefix}damage"), getattr(head, f"{prefix}unavoidable")) for head in result.heads]
    damages = sorted((damage for damage, _ in pairs if damage is not None), reverse=True)
    total = sum(damages)
    if total <= 0:
        return ""
    tenth = max(1, round(len(damages) / 10))
    remains = sum(min(damage, least or 0.0) for damage, least in pairs if damage is not None) / total
    return (
        f"On {kind} the worst {tenth} heads carry {sum(damages[:tenth]) / total:.0%} of the damage; of all of it "
        f"{remains:.0%} would remain with the best weights constructed at rank {result.rank}."
    )


def _fixed(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"
