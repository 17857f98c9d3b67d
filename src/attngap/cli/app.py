"""The tree of verbs."""

from typing import Annotated

import typer

from attngap.cli.bench import bench
from attngap.cli.chat import chat
from attngap.cli.demo import demo
from attngap.cli.diagnose import diagnose
from attngap.cli.eval import evaluate
from attngap.cli.generate import generate
from attngap.cli.linearize import linearize
from attngap.cli.mechanisms import mechanisms
from attngap.cli.plan import plan
from attngap.cli.probe import probe
from attngap.cli.report import report
from attngap.cli.serve import serve
from attngap.cli.theory import theory

app = typer.Typer(
    name="attngap",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> bool:
    if asked:
        from importlib.metadata import version

        print(f"attngap {version('attngap')}")
        raise typer.Exit
    return asked


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    """Which attention heads need softmax, why, and what replaces the rest."""


app.command()(mechanisms)
app.add_typer(theory, name="theory")
app.command()(bench)
app.command()(diagnose)
app.command()(plan)
app.command()(linearize)
app.command()(generate)
app.command()(chat)
app.command("eval")(evaluate)
app.add_typer(probe, name="probe")
app.command()(report)
app.command()(serve)
app.command()(demo)
