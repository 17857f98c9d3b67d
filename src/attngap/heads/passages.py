"""Token passages: calibration and held-out text that never overlap, and a repeated random stress passage."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from attngap.errors import AttngapError

Split = Literal["calibration", "heldout"]
PIECES = 8  # the text is cut in this many pieces ...
HELD_OUT = (3, 7)  # ... of which these are never calibrated on
PERIOD = 256  # of the stress passage unless a window asks for more: short enough to be cheap


def passages(
    tokenizer: PreTrainedTokenizerBase,
    text: str | Sequence[str] | None = None,
    *,
    context: int,
    count: int,
    seed: int = 0,
    split: Split = "calibration",
) -> Int[Tensor, "count context"]:
    """`count` distinct passages of exactly `context` tokens, special tokens included, chosen by `seed`.

    `text` is the text itself, one document or several; by default the Python language reference that ships with Python.
    The splits are pieces of the text whatever the context, so they are disjoint also when their contexts differ.
    """
    prefix, suffix = special_tokens(tokenizer)
    body = context - len(prefix) - len(suffix)
    if body < 1 or count < 1:
        raise AttngapError(
            f"passages need context >= {len(prefix) + len(suffix) + 1} and count >= 1, got {context}, {count}"
        )
    tokens = split_tokens(tokenizer, text, split)
    room = len(tokens) // body
    if room < count:
        raise AttngapError(
            f"The text is too short: its {split} part has {len(tokens)} tokens, room for {room} passages of {context}; "
            f"{count} wanted. Give more text, fewer passages or a shorter context"
        )
    order = torch.randperm(room, generator=torch.Generator().manual_seed(seed))[:count]
    rows = [[*prefix, *tokens[i * body : (i + 1) * body], *suffix] for i in order.tolist()]
    return torch.tensor(rows)


def split_tokens(
    tokenizer: PreTrainedTokenizerBase, text: str | Sequence[str] | None, split: Split = "calibration"
) -> list[int]:
    """All tokens of one split of the text, in order and without special ones."""
    # verbose=False: the pieces are longer than the model's context on purpose
    pieces = _piece(text, split)
    return [i for piece in pieces for i in tokenizer(piece, add_special_tokens=False, verbose=False).input_ids]


def stress(
    tokenizer: PreTrainedTokenizerBase, *, context: int, seed: int = 0, period: int = PERIOD
) -> tuple[Int[Tensor, "1 t"], int]:
    """The same `period` random tokens twice, and that period: the second half can be predicted only by recall."""
    prefix, suffix = special_tokens(tokenizer)
    period = min(period, (context - len(prefix) - len(suffix)) // 2)
    if period < 2:
        raise AttngapError(f"A stress passage needs context >= {len(prefix) + len(suffix) + 4}, got {context}")
    special = set(tokenizer.all_special_ids)
    ordinary = torch.tensor([i for i in range(len(tokenizer)) if i not in special])
    # Distinct tokens where the vocabulary allows, so that only one earlier place matches.
    pick = torch.randperm(len(ordinary), generator=torch.Generator().manual_seed(seed))
    pick = pick.repeat(-(-period // len(pick)))[:period]
    once = ordinary[pick].tolist()
    return torch.tensor([[*prefix, *once, *once, *suffix]]), period


def longest(model: PreTrainedModel) -> int | None:
    """The longest passage that the model has positions for, None when it does not say."""
    said = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    table = next((part for name, part in model.named_modules() if name.endswith("position_embeddings")), None)
    if isinstance(table, nn.Embedding) and table.padding_idx is not None:
        return table.num_embeddings - table.padding_idx - 1  # RoBERTa counts from behind the padding's number
    return said


def check_tokenizer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer whose tokens the model has no embedding for."""
    try:
        known = model.get_input_embeddings()
    except NotImplementedError as error:  # CLIP: towers that are each fed with something else
        raise AttngapError(
            f"{type(model).__name__} reads text beside other things. Only models that read text alone are supported: "
            "Llama, BERT"
        ) from error
    rows = getattr(known, "num_embeddings", None)
    if rows is not None and len(tokenizer) > rows:
        raise AttngapError(
            f"The tokenizer has {len(tokenizer)} tokens and the model embeds {rows}: they do not belong together. Give "
            "the model's own tokenizer, or resize_token_embeddings"
        )


def read(paths: Sequence[str | Path]) -> list[str]:
    """The files' text; a missing, empty or undecodable file is an error."""
    texts = []
    for path in map(Path, paths):
        try:
            if path.exists() and not path.is_file():  # opening a pipe would wait for ever
                raise AttngapError(f"Cannot read the text file '{path}': it is not a file. Give UTF-8 text files")
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise AttngapError(f"Cannot read the text file '{path}': {error}. Give UTF-8 text files") from error
        if not text.strip():
            raise AttngapError(f"The text file '{path}' is empty. Give a file with text in it")
        texts.append(text)
    return texts


def language_reference() -> list[str]:
    """The Python language reference: real prose on every machine, with nothing to download or bundle."""
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before and after a text, such as [CLS] and [SEP]."""
    bare = tokenizer("a", add_special_tokens=False).input_ids
    full = tokenizer("a").input_ids
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return full[:start], full[start + len(bare) :]
    raise AttngapError(
        f"{type(tokenizer).__name__} changes a text's own tokens when it adds special ones; not supported"
    )


def _piece(text: str | Sequence[str] | None, split: Split) -> list[str]:
    documents = language_reference() if text is None else [text] if isinstance(text, str) else list(text)
    joined = "\n\n".join(documents)
    if not joined.strip():
        raise AttngapError("The text is empty. Give some text, or none for the Python language reference")
    cuts = [_word_start(joined, len(joined) * i // PIECES) for i in range(PIECES + 1)]
    held = split == "heldout"
    return [joined[cuts[i] : cuts[i + 1]] for i in range(PIECES) if (i in HELD_OUT) == held]


def _word_start(text: str, place: int) -> int:
    """The first place from here on that begins a word, so that no word is cut in two."""
    while 0 < place < len(text) and not text[place - 1].isspace():
        place += 1
    return place
