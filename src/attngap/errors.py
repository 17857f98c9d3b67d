"""One exception for every mistake a caller can mend: it says what, got, allowed, next."""

import difflib
import json
import os
import shlex
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname


class AttngapError(ValueError):
    """A user's mistake or a limit of ours, in one line that can be acted on. The command line prints it and exits 2."""


def unknown(kind: str, got: str, allowed: Iterable[str], hint: str = "") -> AttngapError:
    """`No mechanism 'gal'. Did you mean 'gla'? Allowed: ...` with the closest name first."""
    names = [str(name) for name in allowed]
    close = difflib.get_close_matches(str(got), names, n=1, cutoff=0.5)
    meant = f" Did you mean {close[0]!r}?" if close else ""
    return AttngapError(f"No {kind} {got!r}.{meant} {hint or 'Allowed: ' + ', '.join(names)}")


def missing_extra(what: str, extra: str) -> AttngapError:
    """`Charts need the extra 'report', which is not installed. Run: ...`, with the line for this environment."""
    return AttngapError(f"{what} the extra {extra!r}, which is not installed. Run: {pip_install()} {_target(extra)}")


def pip_install() -> str:
    """The command that installs into the environment that is running; a bare `pip` may be another one's."""
    return f"{shlex.quote(short_path(sys.executable))} -m pip install"


def _target(extra: str) -> str:
    """What pip must be given for this extra: the folder or wheel attngap was installed from, or its name."""
    try:
        origin = json.loads(metadata.distribution("attngap").read_text("direct_url.json") or "{}")
    except (metadata.PackageNotFoundError, ValueError):
        origin = {}
    parts = urlsplit(origin.get("url", ""))
    path = url2pathname(parts.path)
    if parts.scheme != "file" or not Path(path).exists():
        return f'"attngap[{extra}]"'
    editable = "-e " if origin.get("dir_info", {}).get("editable") else ""
    return f'{editable}"{short_path(path)}[{extra}]"'


def short_path(path: str) -> str:
    """Relative to the current folder where it is inside it, as a person would type it."""
    inside = Path(path).is_relative_to(Path.cwd())
    return os.path.relpath(path) if inside else path
