"""The tree of verbs."""

import typer

app = typer.Typer(
    name="attngap",
    help="Which attention heads need softmax, why, and what replaces the rest.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
