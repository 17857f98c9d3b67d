"""Write docs/reference/cli.md and docs/reference/api.md from the code: `python tools/reference.py`.

A test fails when the pages no longer say what the code says.
"""

import importlib
import inspect
import json
import re
import textwrap
from pathlib import Path
from typing import Any

import typer.main

from attngap.cli.app import app
from attngap.cli.mechanisms import describe
from attngap.mechanisms.catalogue import MECHANISMS
from attngap.probes.tasks.catalogue import TASKS

ROOT = Path(__file__).parents[1]
# What the Python page shows: a module and the names in it.
API: dict[str, tuple[str, ...]] = {
    "attngap": ("load", "diagnose", "linearize", "save", "probe", "catalogue", "mechanism"),
    "attngap.diagnosis.result": ("Diagnosis",),
    "attngap.models.plan": ("Plan",),
    "attngap.conversion.receipt": ("Receipt",),
    "attngap.ops": ("softmax_attention", "linear_attention", "delta_attention", "hybrid_attention"),
    "attngap.mechanisms.base": ("Mechanism", "Streams"),
    "attngap.theory.separation": ("law",),
    "attngap.theory.certificates": ("selection", "floor", "ceiling", "retrieval"),
    "attngap.charts.heads": ("head_map", "bounds", "damage_split", "concentration", "selection"),
}
NOTICE = "<!-- Written by tools/reference.py; change the code, then run it again. -->\n"


def pages() -> dict[Path, str]:
    return {
        ROOT / "docs/reference/cli.md": cli_page(),
        ROOT / "docs/reference/api.md": api_page(),
        ROOT / "src/attngap/cli/facts.json": facts(),
    }


def facts() -> str:
    """What `attngap mechanisms` shows and shells complete, so that neither waits for torch."""
    mechanisms = [describe(cls.name) for cls in MECHANISMS]
    return json.dumps({"mechanisms": mechanisms, "tasks": [task.name for task in TASKS]}, indent=1, default=repr) + "\n"


def cli_page() -> str:
    lines = [NOTICE, "# Command line\n", "Every verb prints one clear line and exits with 2 when something is wrong.\n"]
    for path, command in _commands(typer.main.get_command(app), "attngap"):
        lines += [f"## {path}\n", f"{_paragraphs(command.help or '')}\n", f"```text\n{_usage(path, command)}\n```\n"]
        lines += [_options(command), ""]
    return "\n".join(lines).rstrip() + "\n"


def _commands(command: Any, path: str) -> list[tuple[str, Any]]:
    children = getattr(command, "commands", None)
    if children is None:
        return [(path, command)]
    return [found for name in children for found in _commands(children[name], f"{path} {name}")]


def _usage(path: str, command: Any) -> str:
    arguments = []
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            name = f"{parameter.name.upper()}{'...' if parameter.nargs == -1 else ''}"
            arguments.append(name if parameter.required else f"[{name}]")
    return " ".join([path, *arguments, "[OPTIONS]"])


def _options(command: Any) -> str:
    rows = ["| | default | |", "|---|---|---|"]
    for parameter in command.params:
        if parameter.name == "help":
            continue
        is_argument = parameter.param_type_name == "argument"
        name = parameter.name.upper() if is_argument else ", ".join(parameter.opts)
        rows.append(f"| `{name}` | {_default(parameter)} | {(parameter.help or '').replace('|', chr(92) + '|')} |")
    return "\n".join(rows)


def _default(parameter: Any) -> str:
    value = parameter.default
    if value is None or value is False or callable(value) or value == () or "Sentinel" in repr(value):
        return "required" if parameter.required else ""
    return f"`{value}`"


def _paragraphs(text: str) -> str:
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


def api_page() -> str:
    lines = [NOTICE, "# Python\n"]
    for module_name, names in API.items():
        module = importlib.import_module(module_name)
        lines.append(f"## {module_name}\n")
        for name in names:
            lines += _entry(getattr(module, name), name)
    return "\n".join(lines).rstrip() + "\n"


def _entry(thing: Any, name: str) -> list[str]:
    lines = [f"### {name}\n"]
    if not inspect.isclass(thing):
        lines.append(f"```text\n{_signature(thing, name)}\n```\n")
    lines.append(f"{_doc(thing)}\n")
    if inspect.isclass(thing):
        for key, member in vars(thing).items():
            method = member.__func__ if isinstance(member, classmethod | staticmethod) else member
            if not key.startswith("_") and inspect.isfunction(method) and method.__doc__:
                lines.append(f"```text\n{_signature(method, f'{name}.{key}')}\n```\n\n{_doc(method)}\n")
    return lines


def _signature(function: Any, name: str) -> str:
    """Without annotations' module paths and addresses: what one types."""
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name not in ("self", "cls")]
    shown, starred = [], False
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            shown.append("*")
        starred = starred or parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        prefix = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        default = "" if parameter.default is parameter.empty else f"={_plain(parameter.default)}"
        shown.append(f"{prefix}{parameter.name}{default}")
    return "\n".join(textwrap.wrap(f"{name}({', '.join(shown)})", 100, subsequent_indent="    "))


def _plain(value: Any) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _doc(thing: Any) -> str:
    """Prose as prose, examples as code."""
    text = (inspect.getdoc(thing) or "").replace("  # doctest: +SKIP", "")
    blocks = []
    for part in text.split("\n\n"):
        example = part.lstrip().startswith(">>>")
        blocks.append(f"```text\n{part}\n```" if example else " ".join(part.split()))
    return "\n\n".join(blocks)


if __name__ == "__main__":
    for page, content in pages().items():
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(content, encoding="utf-8")
        print(page.relative_to(ROOT))
