"""What each method costs on one context: CPU seconds at one thread to read and compress it, and a token after it.

Memory is the most that the process held at once while it did so, above what it held before.
"""

import argparse
import contextlib
import ctypes
import gc
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from asking import read_lines
from contexts import contexts
from conversions import (
    OURS,
    THROUGHOUT,
    handed_over,
    load_parts,
    read_exactly,
    read_throughout,
    variants,
)
from presses import (
    DUO,
    KVZIP,
    ORIGINAL,
    PRUNING,
    as_cache,
    is_installed,
    kept_groups,
    load,
    masked,
    prefill,
    press_of,
    quick_scores,
    streaming_masks,
    zip_masks,
)

COSTS = "costs.jsonl"
FIRST = 512  # tokens of a context read before it is timed
WARM, TOKENS = 2, 12  # of decoding, before and while it is timed


class Costs:
    """A file of costs at one length; what is there is not measured again."""

    def __init__(self, folder: Path, length: int):
        self.path, self.length = folder / COSTS, length
        self.row = text_of(folder, length)
        self.done = {row["method"] for row in read_lines(self.path) if row["length"] == length}

    @torch.no_grad()
    def note(self, method: str, compress: Callable[[list[int]], tuple[Any, Any]]) -> None:
        """`compress` reads a context; it gives the model that goes on and its cache."""
        if method in self.done:
            return
        compress(self.row["context"][:FIRST])  # what is loaded or compiled once is no prompt's cost
        forget_peak()
        before, start = held("VmRSS"), time.process_time()
        model, cache = compress(self.row["context"])
        prompt = time.process_time() - start
        token = self._token(model, cache)
        line = {"method": method, "length": self.length, "prompt": prompt, "token": token}
        line["peak"] = None if before is None else (held("VmHWM") or 0) - before
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(line, flush=True)

    def _token(self, model: Any, cache: Any) -> float:
        spent = []
        context = self.row["context"]
        for i, token in enumerate(context[: WARM + TOKENS]):
            start, place = time.process_time(), torch.tensor([[len(context) + i]])
            model(input_ids=torch.tensor([[token]]), past_key_values=cache, position_ids=place, use_cache=True)
            spent.append(time.process_time() - start)
        return sum(spent[WARM:]) / TOKENS


def text_of(folder: Path, length: int) -> dict:
    """The context whose reading is timed."""
    found = [row for row in contexts(folder) if row["length"] == length and row["kind"] == "text"]
    if not found:
        raise SystemExit(
            f"No context of {length} tokens is there. python benchmarks/rivals prepare --lengths {length} makes some"
        )
    return found[0]


def forget_peak() -> None:
    """From now on Linux notes the most that this process holds anew; elsewhere no memory is reported."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # what is free but not given back would hide what comes next
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def held(what: str) -> int | None:
    """Bytes of this process by Linux' name for them; None elsewhere."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith(what))
    return None


def kvpress_costs(options: argparse.Namespace) -> None:
    """Of the original and of kvpress' methods at the first budget, in kvpress' environment."""
    if not is_installed():
        return
    model = load(options.output)
    for length in options.lengths:
        _kvpress_costs(Costs(options.output, length), model, options.budgets[0], options.output)


def _kvpress_costs(costs: Costs, model: Any, budget: float, folder: Path) -> None:
    costs.note(ORIGINAL, lambda tokens: (model, as_cache(_read(model, tokens)[0])))
    for name in PRUNING:
        press = press_of(name, budget)
        costs.note(name, lambda tokens, press=press: (model, as_cache(_read(model, tokens, {0: press})[1][0])))
    kept = kept_groups(costs.row, budget, quick_scores(model, folder, None))
    if kept is None:
        print(f"{DUO} skipped at {costs.length} tokens: {budget:.0%} of the cache leave room for no group")
    else:
        with masked(model) as mask:
            costs.note(DUO, lambda tokens: _duo(model, tokens, kept, mask))
    with masked(model) as mask:
        costs.note(KVZIP, lambda tokens: _zip(model, tokens, budget, mask))


def _read(model: Any, tokens: list[int], presses: dict | None = None) -> tuple:
    return prefill(model, {"context": tokens}, presses or {})


def _duo(model: Any, tokens: list[int], kept: torch.Tensor, mask: Callable) -> tuple[Any, Any]:
    full = _read(model, tokens)[0]
    mask(streaming_masks(kept, len(tokens), full))
    return model, as_cache(full)


def _zip(model: Any, tokens: list[int], budget: float, mask: Callable) -> tuple[Any, Any]:
    full = _read(model, tokens)[0]
    mask(zip_masks(model, {"context": tokens}, full, [budget])[budget])
    return model, as_cache(full)


def our_costs(options: argparse.Namespace) -> None:
    """Of the original and of ours at the first budget, in our environment."""
    parts = load_parts(options.output, options.model, options.window)
    our = variants(parts, options)[OURS]
    for length in options.lengths:
        costs = Costs(options.output, length)
        _our_costs(costs, parts.original, our.model(length, len(costs.row["context"]), options.budgets[0]))


def _our_costs(costs: Costs, original: Any, make: Callable[[], Any] | None) -> None:
    costs.note(f"{ORIGINAL}, our environment", lambda tokens: (original, _whole(original, tokens)))
    if make is None:
        print(f"{OURS} skipped at {costs.length} tokens: no form fits; python benchmarks/rivals forms judges them")
        return
    model = make()
    costs.note(OURS, lambda tokens: (model, handed_over(model, read_exactly(original, tokens)[0])))
    costs.note(THROUGHOUT, lambda tokens: (model, read_throughout(model, tokens)[0]))


def _whole(original: Any, tokens: list[int]) -> Any:
    return as_cache([(layer.k, layer.v) for layer in read_exactly(original, tokens)[0]])
