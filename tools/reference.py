"""Write docs/reference/cli.md and docs/reference/api.md from the code: `python tools/reference.py`.

A test fails when the pages no longer say what the code says.
"""

import dataclasses
import importlib
import inspect
import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pydantic
import typer.main
from pydantic_core import PydanticUndefined

import attngap
from attngap.cli.app import app
from attngap.cli.mechanisms import describe
from attngap.mechanisms.catalogue import MECHANISMS
from attngap.probes.tasks.catalogue import TASKS

ROOT = Path(__file__).parents[1]
# What the Python page shows: a module and the names in it.
API: dict[str, tuple[str, ...]] = {
    "attngap": tuple(name for name in attngap.__all__ if name not in ("__version__", "ops", "theory")),
    "attngap.ops": tuple(attngap.ops.__all__),
    # A class before the function that returns it, so that the plain anchor is the class's, which types link to.
    "attngap.theory.separation": ("Law", "law"),
    "attngap.theory.certificates": (
        "Selection",
        "Floor",
        "Ceiling",
        "Retrieval",
        "selection",
        "floor",
        "ceiling",
        "retrieval",
    ),
    "attngap.diagnosis.result": ("Head", "Verification"),
    "attngap.models.plan": ("ModelFacts", "Replacement", "Point"),
    "attngap.conversion.quality": ("Quality",),
    "attngap.conversion.speed": ("Speed",),
    "attngap.models.capture": ("Call",),
    "attngap.mechanisms.base": ("Streams",),
    "attngap.mechanisms.contracts": ("check",),
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
    value = parameter.show_default if isinstance(parameter.show_default, str) else parameter.default
    if value is None or value is False or callable(value) or value == () or "Sentinel" in repr(value):
        return "required" if parameter.required else ""
    return f"`{value}`"


def _paragraphs(text: str) -> str:
    """Text flows; what a docstring keeps as it stands ("\\b", examples) is printed so."""
    return "\n\n".join(_paragraph(part) for part in text.split("\n\n"))


def _paragraph(part: str) -> str:
    if not part.startswith("\b\n"):
        return " ".join(part.split())
    title, *lines = part.removeprefix("\b\n").splitlines()
    language = "sh" if title.startswith("Example") else "toml"
    return f"{title}\n\n```{language}\n{textwrap.dedent(chr(10).join(lines))}\n```"


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
        return lines + _function(thing, name)
    lines.append(f"{_doc(thing)}\n")
    fields = [*_fields(thing), *_properties(thing)]
    if fields:
        lines += ["| field | type | default | |", "|---|---|---|---|", *fields, ""]
    for key, member in vars(thing).items():
        method = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        written = inspect.isfunction(method) and method.__module__.startswith("attngap.")  # not pydantic's own
        if written and not key.startswith("_") and method.__doc__:
            lines += [f"#### {name}.{key}\n", *_function(method, f"{name}.{key}")]
    return lines


def _function(function: Any, name: str) -> list[str]:
    """What one types, what it does, and a row for each parameter with its type."""
    signature = inspect.signature(function)
    lines = [f"```text\n{_signature(function, name)}\n```\n", f"{_doc(function)}\n"]
    notes = _comments(function)
    rows = [
        f"| `{p.name}` | {_type(p.annotation)} | {'' if p.default is p.empty else f'`{_plain(p.default)}`'} "
        f"| {notes.get(p.name, '')} |"
        for p in signature.parameters.values()
        if p.name not in ("self", "cls")
    ]
    if rows:
        lines += ["| parameter | type | default | |", "|---|---|---|---|", *rows, ""]
    if signature.return_annotation not in (signature.empty, None):
        lines.append(f"Returns {_type(signature.return_annotation)}.\n")
    return lines


def _fields(cls: type) -> Iterator[str]:
    """Rows for the fields of a pydantic model or a dataclass, with the comments beside them in the source."""
    notes: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.startswith("attngap."):
            notes |= _comments(base)
    if issubclass(cls, pydantic.BaseModel):
        for name, field in cls.model_fields.items():
            note = notes.get(name) or (field.description or "").replace("|", "\\|")
            yield _row(field.alias or name, field.annotation, field.default, note)
    elif dataclasses.is_dataclass(cls):
        for field in dataclasses.fields(cls):
            yield _row(field.name, field.type, field.default, notes.get(field.name, ""))


def _row(name: str, annotation: Any, default: Any, note: str) -> str:
    """A default that a constructor makes anew, such as an empty list, is not shown."""
    known = default not in (PydanticUndefined, dataclasses.MISSING) and not isinstance(default, pydantic.BaseModel)
    return f"| `{name}` | {_type(annotation)} | {f'`{_plain(default)}`' if known else ''} | {note} |"


def _properties(cls: type) -> Iterator[str]:
    for base in reversed(cls.__mro__):
        for name, member in vars(base).items():
            getter = member.fget if isinstance(member, property) else getattr(member, "func", None)
            if getter is not None and getter.__module__.startswith("attngap.") and not name.startswith("_"):
                note = (inspect.getdoc(getter) or "").split("\n\n")[0].replace("\n", " ").replace("|", "\\|")
                yield f"| `{name}` | {_type(inspect.signature(getter).return_annotation)} | | {note} |"


def _comments(thing: Any) -> dict[str, str]:
    """name: the comment on the line of its annotation."""
    try:
        source = inspect.getsource(inspect.unwrap(thing))
    except (OSError, TypeError):
        return {}
    found = re.findall(r"^ +(\w+): [^#\n]*  # (.*)$", source, flags=re.MULTILINE)
    return {name: note.replace("|", "\\|") for name, note in found if "noqa" not in note and "pyright" not in note}


def _type(annotation: Any) -> str:
    """As one would write it, without module paths; what this page documents is a link."""
    if annotation is inspect.Parameter.empty:
        return ""
    text = annotation if isinstance(annotation, str) else _plain(annotation)
    if inspect.isclass(annotation) and not hasattr(annotation, "__args__"):
        text = annotation.__name__
    text = re.sub(r"(?<![\"'\w.])(?:[a-z_]\w*\.)+(?=\w)", "", text).replace("NoneType", "None").replace("'", '"')
    text = text.replace("|", "\\|").replace("[", "\\[").replace("]", "\\]").replace("*", "\\*").replace("_", "\\_")
    classes = {name for names in API.values() for name in names if name[0].isupper()}
    return re.sub(r"\b[A-Z]\w+\b", lambda m: f"[{m[0]}](#{m[0].lower()})" if m[0] in classes else m[0], text)


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
