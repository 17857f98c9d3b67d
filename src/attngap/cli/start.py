"""How to start attngap from where the user is."""

import shlex
import shutil
import sys
from pathlib import Path

from attngap.errors import short_path


def start() -> str:
    """`attngap` where that is this environment's, else the path to it, as in `.venv/bin/attngap`."""
    name = Path(sys.argv[0]).name if Path(sys.argv[0]).stem == "attngap" else "attngap"  # attngap.exe on Windows
    here = Path(sys.executable).with_name(name)
    found = shutil.which("attngap")
    if not here.exists() or (found and Path(found).samefile(here)):
        return "attngap"
    return shlex.quote(short_path(str(here)))
