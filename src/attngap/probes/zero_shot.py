"""Token tasks put to a language model as it is: recall, copying and induction without any training."""

import dataclasses
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from attngap.errors import AttngapError
from attngap.models.placement import device_of
from attngap.probes.tasks.base import Task, stream

ZERO_SHOT = ("mqar", "copy", "selective-copy", "induction", "fuzzy-recall")


@dataclasses.dataclass(frozen=True)
class ZeroShot:
    """`score` counts an answer as right when the right token beats the other tokens of the task; `open` when it beats
    the whole vocabulary."""

    score: float
    open: float
    sequences: int
    tokens: int


@torch.no_grad()
def zero_shot(
    model: Any, task: Task, *, tokenizer: Any = None, sequences: int = 64, batch: int = 8, seed: int = 0
) -> ZeroShot:
    """Score a Hugging Face causal model on a token task.

    Every sequence gets its own random ordinary tokens for the task's symbols, so that no particular token matters, and
    begins with the tokenizer's first token where it has one.
    """
    if task.name not in ZERO_SHOT:
        raise AttngapError(f"{task.name} cannot be put to a language model as tokens. Allowed: {', '.join(ZERO_SHOT)}")
    words = ordinary_tokens(model, tokenizer)
    symbols = task.vocabulary or 0
    if symbols > len(words):
        raise AttngapError(f"{task.name} needs {symbols} different tokens, the model has {len(words)} ordinary ones")
    first = getattr(tokenizer, "bos_token_id", None)
    model.eval()
    right = whole = asked = 0
    for start in range(0, sequences, batch):
        count = min(batch, sequences - start)
        generator = stream("zero-shot", seed, start)
        drawn = task.sample(count, generator)
        names = torch.rand(count, len(words), generator=generator).topk(symbols, dim=1).indices
        names = words[names]  # (count, symbols): this sequence's token for each symbol
        ids = names.gather(1, drawn.inputs)
        shift = 0
        if first is not None:
            ids, shift = torch.cat([torch.full((count, 1), first), ids], dim=1), 1
        logits = model(input_ids=ids.to(device_of(model))).logits.float().cpu()  # (b, t, vocabulary)
        rows = logits[torch.arange(count)[:, None], drawn.where + shift]  # (b, s, vocabulary)
        targets = names.gather(1, drawn.targets)
        among = rows.gather(2, names[:, None, : task.outputs].expand(-1, rows.shape[1], -1))
        right += int((among.argmax(-1) == drawn.targets).sum())
        whole += int((rows.argmax(-1) == targets).sum())
        asked += targets.numel()
    return ZeroShot(right / asked, whole / asked, sequences, task.tokens)


def ordinary_tokens(model: Any, tokenizer: Any) -> Int[Tensor, " n"]:
    """Ids that are neither special nor beyond what the model embeds."""
    size = model.get_input_embeddings().num_embeddings
    special = set(getattr(tokenizer, "all_special_ids", []) or [])
    limit = min(size, len(tokenizer)) if tokenizer is not None else size
    return torch.tensor([index for index in range(limit) if index not in special])
