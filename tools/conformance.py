"""Run every architecture that transformers builds from a small config through the whole path; write docs/models.md.

python tools/conformance.py            all kinds, some minutes
python tools/conformance.py causal     one kind, printed and not written
"""

import json
import logging
import subprocess
import sys
import warnings
from pathlib import Path

import torch
import transformers

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.conformance import Row, row  # noqa: E402
from tests.zoo_architectures import KINDS, architectures  # noqa: E402

PAGE = ROOT / "docs" / "models.md"
KEPT = ROOT / ".conformance.jsonl"  # rows of a run that was stopped
HEAD = """# Architectures

Which of transformers' architectures convert, and the line with which the others are refused before any work is done.
Every row is a run on a tiny model with random weights. A row that converts was captured; gave the same output to the
bit with nothing replaced; was converted in every layer that can be, all heads but one; gave the same logits token by
token through a cache as without one, with padding on the left and on the right, and after saving and loading; and left
the original as it was. "Layers" says how many of its attention layers were replaced: others slide or share keys.

Replacements are random and put in by `swap`: fitting and diagnosis are not part of a row, and padding is left out where
a class takes neither mask nor positions.

Made by `python tools/conformance.py` with transformers {transformers} and torch {torch}, at commit {commit}.
Where transformers itself does not build a class, or a library is missing, the row is the line with which a folder of it
is refused.

{summary}
"""


def main(kinds: list[str]) -> int:
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    done = {}
    if KEPT.exists():
        done = {tuple(kept["key"]): kept for kept in map(json.loads, KEPT.read_text().splitlines())}
    found = []
    for each in architectures(*kinds):
        key = (each.kind, each.name, each.class_name)
        if key not in done:
            done[key] = {"key": key, **_plain(row(each))}
            with KEPT.open("a") as file:
                file.write(json.dumps(done[key]) + "\n")
        found.append(done[key])
        print(*key, done[key]["says"])
    faults = [each for each in found if each["state"] == "fault"]
    if not kinds:
        PAGE.write_text(page(found), encoding="utf-8")
    KEPT.unlink(missing_ok=True)
    return len(faults)


def _plain(found: Row) -> dict[str, str]:
    if found.unbuilt is not None:
        return {"state": "unbuilt", "says": found.unbuilt}
    if found.refused is not None:
        return {"state": "refused", "says": found.refused}
    if found.faults():
        return {"state": "fault", "says": "; ".join(found.faults())}
    return {"state": "converts", "says": f"{found.replaced} of {found.layers}"}


def page(found: list[dict]) -> str:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    lines = ["| | convert | refused in a line | no small config |", "|---|---|---|---|"]
    for kind in KINDS:
        states = [each["state"] for each in found if each["key"][0] == kind]
        lines.append(
            f"| {kind} | " + " | ".join(str(states.count(s)) for s in ("converts", "refused", "unbuilt")) + " |"
        )
    text = HEAD.format(
        transformers=transformers.__version__,
        torch=torch.__version__,
        commit=commit.stdout.strip(),
        summary="\n".join(lines),
    )
    for kind in KINDS:
        mine = [each for each in found if each["key"][0] == kind]
        text += f"\n## {kind.capitalize()}\n\n"
        text += _table("layers", [each for each in mine if each["state"] in ("converts", "fault")])
        text += _table("refused because", [each for each in mine if each["state"] == "refused"])
        text += _table(
            "not tried: no small config makes one here", [each for each in mine if each["state"] == "unbuilt"]
        )
    return text


def _table(column: str, rows: list[dict]) -> str:
    if not rows:
        return ""
    body = "".join(f"| `{each['key'][2]}` | {each['says'].replace('|', '/')} |\n" for each in rows)
    return f"| class | {column} |\n|---|---|\n{body}\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
