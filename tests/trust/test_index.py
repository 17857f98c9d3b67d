"""Every test that docs/reliability.md names is there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def test_every_test_that_is_named_exists():
    named = NAMED.findall((ROOT / "docs" / "reliability.md").read_text(encoding="utf-8"))
    assert len(named) > 60
    missing = [
        f"{path}::{name}"
        for path, name in named
        if not re.search(rf"^def {name}\(", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert missing == []
