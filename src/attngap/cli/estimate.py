"""`attngap estimate`: what a diagnosis and a conversion would cost here, and what the latter would gain."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from attngap.cli.placement import DEVICE, DTYPE, Device, Dtype
from attngap.conversion.options import ConversionOptions
from attngap.diagnosis.options import DiagnosisOptions
from attngap.options import KEEP

if TYPE_CHECKING:
    from attngap.costs.estimate import Estimate

CONTEXT = DiagnosisOptions.default("context")


def estimate(
    model: Annotated[str, typer.Argument(help="A Hugging Face folder or id, a config.json's folder, smollm2.")],
    context: Annotated[int, typer.Option(help="Tokens per passage, of both verbs.")] = DiagnosisOptions.default(
        "context"
    ),
    keep: Annotated[float, typer.Option(help="Share of heads that keep softmax.")] = KEEP,
    length: Annotated[int | None, typer.Option(help=ConversionOptions.help("length"))] = None,
    workers: Annotated[int, typer.Option(help="Cores of a Ray cluster for linearize.")] = 1,
    dtype: Dtype = DTYPE,
    device: Device = DEVICE,
    anew: Annotated[bool, typer.Option("--anew", help="Time this machine again.")] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the estimate as JSON on stdout.")] = False,
) -> None:
    """Say what diagnosing and converting a model takes, in seconds, memory and disk, before any of it is loaded.

    Only the config is read. This machine is timed for heads of that shape once, in about a minute, and remembered.

    \b
    Examples:
      attngap estimate smollm2
      attngap estimate meta-llama/Llama-3.1-8B --dtype bfloat16 --workers 64
    """
    looked = DiagnosisOptions(context=context)
    changed = ConversionOptions(
        keep=keep, context=context, length=length, tokens=max(ConversionOptions.default("tokens"), 2 * context)
    )
    from attngap.costs.estimate import estimate as run

    found = run(
        model,
        dtype=dtype,
        device=device,
        workers=workers,
        keep=keep,
        diagnosis=looked,
        conversion=changed,
        anew=anew,
        trust_remote_code=trust_remote_code,
    )
    if as_json:
        print(found.model_dump_json())
    else:
        show(found)


def show(found: "Estimate") -> None:
    """Two small tables and the notes."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(markup=False)
    left = "" if found.available is None else f", {_size(found.available)} left here"
    where = f"{found.dtype} on {found.device}" + (f", {found.workers} workers" if found.workers > 1 else "")
    console.print(
        f"{found.model}: {found.parameters / 1e9:.2f}B parameters, {found.layers} layers of {found.heads} heads; "
        f"{where}: {_size(found.weights)} of weights{left}",
        highlight=False,
        soft_wrap=True,
    )
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("verb", "time", "memory", "beyond the weights", "disk"):
        table.add_column(name, justify="left" if name == "verb" else "right", no_wrap=True)
    costs: tuple[tuple[str, Any], ...] = (("diagnose", found.diagnose), ("linearize", found.linearize))
    for verb, cost in costs:
        table.add_row(verb, time_of(cost.seconds), _size(cost.memory), _size(cost.beyond), _size(cost.disk))
    console.print(table)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("tokens", "cache", "converted", "a token reads", "converted", "faster"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in found.gains:
        before, after = each.token_seconds, each.converted_token_seconds
        cells = (f"{each.context:,}", _size(each.cache), _size(each.converted_cache))
        table.add_row(*cells, f"{before:.3g} s", f"{after:.3g} s", f"{before / after:.2f}x")
    console.print(f"With {found.keep:.0%} of the heads kept, by what decoding must read:", highlight=False)
    console.print(table)
    for note in found.notes:
        console.print(note, highlight=False, soft_wrap=True)


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def time_of(seconds: float) -> str:
    """In the unit that a person would say it in.

    >>> [time_of(x) for x in (42.0, 600.0, 36000.0, 900000.0)]
    ['42 s', '10 min', '10.0 h', '10.4 days']
    """
    for limit, unit, name in ((120, 1, "s"), (7200, 60, "min")):
        if seconds < limit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds / 3600:.1f} h" if seconds < 172800 else f"{seconds / 86400:.1f} days"
