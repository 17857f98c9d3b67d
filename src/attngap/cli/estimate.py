"""`attngap estimate`: what a diagnosis and a conversion would cost here, and what the latter would gain."""

from typing import Annotated

import typer

from attngap.cli.placement import DEVICE, DTYPE, Device, Dtype
from attngap.conversion.options import ConversionOptions
from attngap.diagnosis.options import DiagnosisOptions
from attngap.options import KEEP

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
    from attngap.costs.view import show

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
