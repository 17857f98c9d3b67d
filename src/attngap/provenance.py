"""Where a number comes from: library versions, machine, command, commit."""

import functools
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

LIBRARIES = ("attngap", "torch", "transformers", "numpy", "scipy")


def provenance(**extra: Any) -> dict[str, Any]:
    """A JSON-ready record of what produced a result; `extra` adds seeds and options."""
    return {
        "command": " ".join(sys.argv),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {name: found for name in LIBRARIES if (found := _version(name))},
        "python": platform.python_version(),
        "machine": {"cpu": _cpu(), "cores": os.cpu_count(), "system": platform.platform(terse=True)},
        "commit": _commit(),
        **extra,
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


@functools.cache
def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


@functools.cache
def _commit() -> str | None:
    """The checkout's commit, when attngap runs from one."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
