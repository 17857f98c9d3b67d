"""kvpress' methods as they come, in an environment of their own.

Most of them let the original read the context exactly and prune each layer's cache behind it, so one pass serves all of
them at all budgets. KVzip reads the context a second time to score it; that is shared by its budgets.
"""

import argparse
import contextlib
import importlib.util
import json
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from asking import Answers, full_bytes
from contexts import wanted
from heads import read_scores, scores_path

SINKS, RECENT = 128, 256  # of kvpress' DuoAttention
DUO, DUO_OURS = "DuoAttention", "DuoAttention's form, our heads"
KVZIP, ORIGINAL = "KVzip", "original"
PRUNING = ("StreamingLLM", "SnapKV", "ExpectedAttention")
INSTALL = (
    "In an environment of its own: python -m venv kvpress && kvpress/bin/pip install torch==2.13.0 && "
    'kvpress/bin/pip install kvpress "transformers<5.3"; then run this step with kvpress/bin/python'
)
Tensors = list[tuple[torch.Tensor, torch.Tensor]]  # keys and values by layer


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()


def is_installed() -> bool:
    """Whether kvpress is; where not, say which methods are skipped and what installs it."""
    if importlib.util.find_spec("kvpress") is not None:
        return True
    print(f"{', '.join((*PRUNING, KVZIP, DUO))} skipped: kvpress is not installed here. {INSTALL}")
    return False


def kvpress(options: argparse.Namespace) -> None:
    """Every method at every budget, on every context of the wanted lengths that has no answers yet."""
    if not is_installed():
        return
    model = load(options.output)
    answers = Answers(options.output)
    scores = {DUO: quick_scores(model, options.output, options.text[0] if options.text else None)}
    our = read_scores(options.output, "our", RECENT)
    if our is None:
        print(f"{DUO_OURS} skipped: our scores are not there. python benchmarks/rivals scores makes them")
    else:
        scores[DUO_OURS] = torch.tensor(our)
    for row in wanted(options):
        _context(model, row, options.budgets, scores, answers)


def _context(model: Any, row: dict, budgets: list[float], scores: dict[str, torch.Tensor], answers: Answers) -> None:
    pruned = {name: answers.missing(name, budgets, row) for name in PRUNING}
    duo = {
        name: {budget: kept_groups(row, budget, score) for budget in answers.missing(name, budgets, row)}
        for name, score in scores.items()
    }
    zipped, original = answers.missing(KVZIP, budgets, row), answers.missing(ORIGINAL, [None], row)
    duo = {name: {at: kept for at, kept in each.items() if kept is not None} for name, each in duo.items()}
    if not (any(pruned.values()) or any(duo.values()) or zipped or original):
        return
    presses = {(name, budget): press_of(name, budget) for name, missing in pruned.items() for budget in missing}
    full, held, spent, seconds = prefill(model, row, presses)
    if original:
        answers.ask(ORIGINAL, None, row, model, lambda: as_cache(full), 1.0, seconds)
    for (name, budget), tensors in held.items():
        took = seconds + spent[name, budget]
        answers.ask(name, budget, row, model, lambda kept=tensors: as_cache(kept), share_of(model, row, tensors), took)
    for name, kept in duo.items():
        for budget, groups in kept.items():
            masks = streaming_masks(groups, len(row["context"]), full)
            _ask_masked(model, row, full, masks, answers, name, budget, seconds)
    if zipped:
        start = time.process_time()
        by_budget = zip_masks(model, row, full, zipped)
        took = seconds + time.process_time() - start
        for budget, masks in by_budget.items():
            _ask_masked(model, row, full, masks, answers, KVZIP, budget, took)


def press_of(name: str, budget: float) -> Any:
    import kvpress

    makers: dict[str, Callable[[float], Any]] = {
        "StreamingLLM": kvpress.StreamingLLMPress,
        "SnapKV": kvpress.SnapKVPress,
        "ExpectedAttention": kvpress.ExpectedAttentionPress,
    }
    return makers[name](1 - budget)


@torch.no_grad()
def prefill(model: Any, row: dict, presses: dict) -> tuple[Tensors, dict[Any, Tensors], dict[Any, float], float]:
    """One exact pass: the whole cache, what each press leaves of it, the seconds of each, and those of the pass."""
    from transformers import DynamicCache

    full: Tensors = []
    held: dict[Any, Tensors] = {key: [] for key in presses}
    spent = dict.fromkeys(presses, 0.0)

    def watch(module: Any, args: Any, kwargs: dict, output: Any) -> None:
        layer = kwargs["past_key_values"].layers[module.layer_idx]
        full.append((layer.keys, layer.values))
        for key, press in presses.items():
            start = time.process_time()
            held[key].append(press.compress(module, kwargs["hidden_states"], *full[-1], output[1], kwargs))
            spent[key] += time.process_time() - start

    hooks = []
    for layer in model.model.layers:
        layer.self_attn.rotary_emb = model.model.rotary_emb  # as kvpress itself hands it to its presses
        layer.self_attn.masked_key_indices = None
        hooks.append(layer.self_attn.register_forward_hook(watch, with_kwargs=True))
    start = time.process_time()
    try:
        tokens = torch.tensor([row["context"]])
        model(input_ids=tokens, past_key_values=DynamicCache(config=model.config), logits_to_keep=1)
    finally:
        for hook in hooks:
            hook.remove()
    return full, held, spent, time.process_time() - start - sum(spent.values())


def as_cache(tensors: Tensors) -> Any:
    """A cache of these tensors; what is read after them goes to new ones."""
    from transformers import DynamicCache

    cache = DynamicCache()
    for layer, (keys, values) in enumerate(tensors):
        cache.update(keys, values, layer)
    return cache


def share_of(model: Any, row: dict, tensors: Tensors) -> float:
    held = sum(x.numel() * x.element_size() for pair in tensors for x in pair)
    return held / full_bytes(model.config, len(row["context"]))


Masks = list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]  # what each layer's heads may no longer read


@contextlib.contextmanager
def masked(model: Any) -> Iterator[Callable[[Masks], None]]:
    """Hands out what sets the masks that kvpress' attention obeys; they are gone afterwards."""

    def mask(masks: Iterable) -> None:
        for layer, each in zip(model.model.layers, masks, strict=True):
            layer.self_attn.masked_key_indices = each

    try:
        yield mask
    finally:
        mask([None] * len(model.model.layers))


def _ask_masked(
    model: Any, row: dict, full: Tensors, masks: Masks, answers: Answers, name: str, budget: float, seconds: float
) -> None:
    """kvpress masks where heads hold different tokens; the share is of what is not masked."""
    share = 1 - sum(len(each[0]) for each in masks) / sum(keys[..., 0].numel() for keys, _ in full)
    with masked(model) as mask:
        mask(masks)
        try:
            answers.ask(name, budget, row, model, lambda: as_cache(full), share, seconds)
        except ValueError as error:  # kvpress looks for a key that no query likes, and may find none
            print(f"{name} skipped at {budget:.0%} of {row['length']} tokens of {row['kind']}: {error}", flush=True)


def kept_groups(row: dict, budget: float, scores: torch.Tensor) -> torch.Tensor | None:
    """The groups that keep everything where the others hold sinks and recent tokens; None where those alone exceed."""
    near = (SINKS + RECENT) / len(row["context"])
    count = int(scores.numel() * (budget - near) / (1 - near)) if budget > near else 0
    if count < 1:
        return None
    kept = torch.zeros(scores.numel(), dtype=torch.bool)
    kept[scores.flatten().argsort(descending=True)[:count]] = True
    return kept.view(scores.shape)


def streaming_masks(kept: torch.Tensor, length: int, full: Tensors) -> Masks:
    masks = []
    for groups, (keys, _) in zip(kept, full, strict=True):
        masked = torch.zeros_like(keys[..., 0], dtype=torch.bool)
        masked[:, ~groups, SINKS : length - RECENT] = True
        masks.append(torch.nonzero(masked, as_tuple=True))
    return masks


@torch.no_grad()
def zip_masks(model: Any, row: dict, full: Tensors, budgets: list[float]) -> dict[float, Masks]:
    """KVzip's own scoring once, its own choice of what to mask at each budget."""
    from kvpress import KVzipPress

    found: dict[float, Masks] = {}

    class Scored(KVzipPress):
        def compress_post(self, model: Any) -> None:
            for budget in budgets:
                self.compression_ratio = 1 - budget
                super().compress_post(model)
                found[budget] = [layer.self_attn.masked_key_indices for layer in model.model.layers]
            for layer in model.model.layers:
                layer.self_attn.masked_key_indices = None

    press = Scored(1 - budgets[0])
    with press(model):  # reads the context again after this block; that it was read is said here
        press._context_ids, press._cache = torch.tensor([row["context"]]), as_cache(full)
    return found


def quick_scores(model: Any, folder: Path, text: Path | None) -> torch.Tensor:
    """kvpress' quick scores of DuoAttention's heads, from books in place of the data set it would download."""
    from kvpress.presses import duo_attention_press

    path = scores_path(folder, "duo")
    if not path.exists():
        if text is None:
            raise SystemExit("DuoAttention's scores need a book to read: give --text BOOK once")
        chapters = Chapters(text.read_text(encoding="utf-8"))
        duo_attention_press.load_dataset = lambda *args, **kwargs: chapters
        start = time.process_time()
        found = duo_attention_press.duo_attention_on_the_fly(model)
        path.write_text(json.dumps({"groups": found.tolist(), "seconds": time.process_time() - start}))
    return torch.tensor(json.loads(path.read_text())["groups"])


class Chapters:
    """What DuoAttention's scoring asks of a data set, from a text of one's own."""

    SIZE = 2500  # characters: its mean queries and keys need no long passages

    def __init__(self, text: str):
        self.text = text

    def to_pandas(self) -> "Chapters":
        return self

    def sample(self, count: int, random_state: int) -> dict[str, Any]:
        pieces = [self.text[i : i + self.SIZE] for i in range(0, len(self.text) - self.SIZE, self.SIZE)]
        return {"chapter": _Listed(pieces[:: max(1, len(pieces) // count)][:count])}


class _Listed(list):
    def tolist(self) -> list[str]:
        return list(self)
