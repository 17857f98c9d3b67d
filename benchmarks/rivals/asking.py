"""Ask the questions about a context of a cache that does not know them, and write down each answer once.

Needs torch and transformers only: it runs in kvpress' environment as in ours.
"""

import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

CONTEXTS, ANSWERS = "contexts.jsonl", "answers.jsonl"
PIECE = 32  # tokens read at once after the context: masks of kvpress need few queries at a time
Cell = tuple[str, float | None, str, int, int]  # method, budget, kind, length, example


def read_lines(path: Path) -> list[dict]:
    """The lines of a file of JSON; a last one cut short by a stopped run is dropped, and also from the file."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        path.write_text("".join(lines[:-1]), encoding="utf-8")
        lines.pop()
    return [json.loads(line) for line in lines]


class Answers:
    """The file of finished cells: one method at one budget on one context each."""

    def __init__(self, folder: Path):
        self.folder, self.path = folder, folder / ANSWERS
        self.done = {_cell(row) for row in read_lines(self.path)}

    def missing(self, method: str, budgets: Iterable[float | None], row: dict) -> list[float | None]:
        at = (row["kind"], row["length"], row["example"])
        return [budget for budget in budgets if (method, budget, *at) not in self.done]

    def add(self, method: str, budget: float | None, row: dict, **found: Any) -> None:
        line = {"method": method, "budget": budget, **{name: row[name] for name in ("kind", "length", "example")}}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line | found) + "\n")
        self.done.add(_cell(line))
        print(f"{time.strftime('%T')} {method} {budget} {row['kind']} {row['length']} {row['example']}", flush=True)

    @torch.no_grad()
    def ask(
        self,
        method: str,
        budget: float | None,
        row: dict,
        model: Any,
        fresh: Callable[[], Any],
        share: float,
        seconds: float,
    ) -> None:
        """Ask everything, each time of a cache as it was after the context."""
        start, scores = time.process_time(), []
        for place, (task, ask, answer) in enumerate(row["questions"]):
            logits = read_on(model, fresh(), len(row["context"]), [*ask, *answer])[len(ask) - 1 : -1]
            wanted = torch.tensor(answer)
            if task == "text":
                scores.append([task, *self._text_scores(row, place, logits, wanted)])
            else:
                scores.append([task, float((logits.argmax(-1) == wanted).float().mean())])
        asking = time.process_time() - start
        self.add(method, budget, row, share=share, seconds=seconds, asking=asking, scores=scores)

    def _text_scores(self, row: dict, place: int, logits: torch.Tensor, wanted: torch.Tensor) -> tuple[list, list]:
        """Divergence from the original and loss, nats at each token. Whoever comes first must be the original."""
        path = self.folder / "original" / f"{row['kind']}-{row['length']}-{row['example']}-{place}.pt"
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            torch.save(logits.half(), path)
        theirs = torch.load(path, weights_only=True).float().log_softmax(-1)
        ours = logits.float().log_softmax(-1)
        divergence = (theirs.exp() * (theirs - ours)).sum(-1)
        loss = -ours.gather(-1, wanted[:, None])[:, 0]
        return [round(x, 5) for x in divergence.tolist()], [round(x, 5) for x in loss.tolist()]


def _cell(row: dict) -> Cell:
    return (row["method"], row["budget"], row["kind"], row["length"], row["example"])


@torch.no_grad()
def read_on(model: Any, cache: Any, start: int, tokens: list[int]) -> torch.Tensor:
    """The logits at tokens that come after a context of `start` tokens."""
    found = []
    for first in range(0, len(tokens), PIECE):
        piece = torch.tensor([tokens[first : first + PIECE]])
        place = torch.arange(start + first, start + first + piece.shape[1])[None]
        found.append(model(input_ids=piece, past_key_values=cache, position_ids=place, use_cache=True).logits[0])
    return torch.cat(found)


def full_bytes(config: Any, tokens: int) -> int:
    """What the original's cache of so many tokens takes, in float32."""
    return 2 * 4 * tokens * config.num_hidden_layers * config.num_key_value_heads * head_dim(config)


def head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
