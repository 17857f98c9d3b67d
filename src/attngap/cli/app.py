"""The tree of verbs."""

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from attngap.cli.bench import bench
from attngap.cli.chat import chat
from attngap.cli.demo import demo
from attngap.cli.diagnose import diagnose
from attngap.cli.estimate import estimate
from attngap.cli.eval import evaluate
from attngap.cli.generate import generate
from attngap.cli.linearize import linearize
from attngap.cli.mechanisms import mechanisms
from attngap.cli.plan import plan
from attngap.cli.probe import probe
from attngap.cli.report import report
from attngap.cli.serve import serve
from attngap.cli.theory import theory

# In the order of the story, each verb with a line that fits a terminal of 80 columns.
VERBS = {
    "demo": (demo, "The whole story on a real model, on a CPU, in minutes."),
    "diagnose": (diagnose, "Which heads of a model need softmax, and why?"),
    "plan": (plan, "Which heads to keep, and what another share would cost."),
    "linearize": (linearize, "Replace the other heads; see what it costs and gains."),
    "estimate": (estimate, "What would both cost for this model, and what would it gain?"),
    "generate": (generate, "Continue a prompt, token by token."),
    "chat": (chat, "Talk to the converted model, to the original, or to both."),
    "eval": (evaluate, "Measure a converted model again, or on long tasks."),
    "report": (report, "One page to mail, from any mix of results."),
    "serve": (serve, "Explore in the browser: the law, heads, both models."),
    "mechanisms": (mechanisms, "The mechanisms: paper, size of the state, what they learn."),
    "bench": (bench, "Speed and memory of the ops beside their peers."),
}
GROUPS = {"theory": theory, "probe": probe}


class InOrder(TyperGroup):
    """Groups of verbs stand among the verbs, before what lists and times; Typer puts them last."""

    def list_commands(self, ctx: Any) -> list[str]:
        verbs = [name for name in super().list_commands(ctx) if name not in GROUPS]
        before = verbs.index("mechanisms")
        return [*verbs[:before], *GROUPS, *verbs[before:]]


app = typer.Typer(
    name="attngap",
    cls=InOrder,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its boxes leave 22 of 80 columns for words
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
    """Which attention heads need softmax, why, and what replaces the rest.

    attngap VERB --help shows what a verb takes, with examples.
    """


for verb, (function, line) in VERBS.items():
    app.command(verb, short_help=line)(function)
for verb, group in GROUPS.items():
    app.add_typer(group, name=verb)
