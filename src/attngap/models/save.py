"""Converted models on disk: a small adapter beside the base model's name and hash, or a folder that stands alone."""

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from attngap.errors import AttngapError
from attngap.mechanisms.base import Mechanism
from attngap.mechanisms.catalogue import mechanism
from attngap.models.auto import CODE, CODE_FILE, config_json
from attngap.models.lora import add_lora
from attngap.models.plan import Plan, architecture
from attngap.models.swap import CHILD, mixed_heads, swap
from attngap.provenance import provenance

SCHEMA = "attngap.conversion/1"
RECORD, WEIGHTS, BASE, CARD = "attngap.json", "adapter.safetensors", "base", "README.md"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Base(_Strict):
    """The original model: how to load it, and a hash of all its weights."""

    name: str  # what `attngap.load` takes; "base" is the folder inside this one
    architecture: str
    sha256: str


class Layer(_Strict):
    """One layer's replacement: the arguments of `attngap.mechanism`, and the heads that keep softmax."""

    layer: NonNegativeInt
    mechanism: str
    heads: int
    dim: int
    value_dim: int
    options: dict[str, Any]
    keep: tuple[int, ...]

    def build(self) -> Mechanism:
        return mechanism(self.mechanism, self.heads, self.dim, self.value_dim, **self.options)


class Conversion(_Strict):
    """attngap.json: everything needed to put a converted model together again."""

    schema_: Literal["attngap.conversion/1"] = Field(default=SCHEMA, alias="schema")
    base: Base
    layers: tuple[Layer, ...]
    plan: Plan
    lora: NonNegativeInt = 0  # rank; zero means none
    provenance: dict[str, Any] = {}


def mark(model: PreTrainedModel, conversion: Conversion) -> None:
    """Let the model know how it was converted, for `record` and `save`."""
    object.__setattr__(model, "conversion", conversion)


def record(model: PreTrainedModel) -> Conversion:
    """How this model was converted; an error for one that was not."""
    found = getattr(model, "conversion", None)
    if not isinstance(found, Conversion):
        raise AttngapError(
            f"This {type(model).__name__} was not converted by attngap. Convert it: attngap.linearize, then save"
        )
    return found


def weights_hash(model: PreTrainedModel) -> str:
    """sha256 of every weight's name, shape and float32 values."""
    digest = hashlib.sha256(architecture(model).encode())
    for name, tensor in sorted(model.named_parameters()):
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().float().cpu().contiguous().numpy().data)
    return digest.hexdigest()


def save(
    model: PreTrainedModel,
    directory: str | Path,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    original: PreTrainedModel | None = None,
    card: str | None = None,
) -> None:
    """Write a converted model: the adapter alone, or with the `original` beside it a folder that needs nothing else.

    >>> attngap.save(converted, "smollm2-linear", tokenizer=tokenizer)  # doctest: +SKIP
    """
    conversion = record(model)
    folder = Path(directory)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if original is not None:
            original.save_pretrained(folder / BASE)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder / BASE)
            conversion = conversion.model_copy(update={"base": conversion.base.model_copy(update={"name": BASE})})
        save_file(_adapter(model), folder / WEIGHTS, metadata={"format": "pt"})
        config = config_json(conversion.base.architecture)
        (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
        (folder / CODE_FILE).write_text(CODE, encoding="utf-8")
        (folder / RECORD).write_text(conversion.model_dump_json(by_alias=True, indent=1) + "\n", encoding="utf-8")
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        if card is not None:
            (folder / CARD).write_text(card, encoding="utf-8")
    except OSError as error:
        raise AttngapError(f"Cannot write the model to '{folder}': {error}. Choose another folder") from error


def _adapter(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """What the base model does not have: the replacements' parameters and LoRA's."""
    return {
        name: tensor.detach().contiguous()
        for name, tensor in model.state_dict().items()
        if f".{CHILD}." in name or ".lora_" in name
    }


def load_converted(
    directory: str | Path, *, base: str | None = None, dtype: torch.dtype | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The converted model and its tokenizer. `base` says where the base model is now, if it has moved."""
    folder = Path(directory)
    conversion = read_record(folder)
    original, tokenizer = load_base(folder, conversion, base)
    converted = assemble(original, conversion)
    try:
        weights = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise AttngapError(f"Cannot read '{folder / WEIGHTS}': {error}. Convert the model again") from error
    wanted = set(_adapter(converted))
    if set(weights) != wanted:
        odd = sorted(wanted ^ set(weights))[0]
        raise AttngapError(f"'{folder / WEIGHTS}' does not match its {RECORD}: {odd!r} is in only one of them")
    converted.load_state_dict(weights, strict=False)
    if dtype is not None:
        converted.to(dtype=dtype)  # pyright: ignore[reportCallIssue]
    return converted.eval(), tokenizer


def load_base(
    folder: Path, conversion: Conversion, base: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model a folder was converted from, its weights checked against the hash."""
    from attngap.models.load import load  # which opens converted folders through `load_converted`

    name = conversion.base.name
    source = base or (str(folder / BASE) if name == BASE else name)
    try:
        original, tokenizer = load(source)
    except AttngapError as error:
        raise AttngapError(f"'{folder}' is an adapter of {name!r}, which did not load. {error}") from error
    found = weights_hash(original)
    if found != conversion.base.sha256:
        raise AttngapError(
            f"'{folder}' was made from other weights than {source!r} has: sha256 {conversion.base.sha256[:12]}... "
            f"expected, {found[:12]}... found. Give the base model it was made from"
        )
    return original, tokenizer


def read_record(folder: Path) -> Conversion:
    try:
        return Conversion.model_validate_json((folder / RECORD).read_text(encoding="utf-8"))
    except OSError as error:
        raise AttngapError(f"'{folder}' is not a converted model: {error}. Write one: attngap linearize") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise AttngapError(f"'{folder / RECORD}' is wrong at {place!r}: {first['msg']}") from error


def assemble(original: PreTrainedModel, conversion: Conversion) -> PreTrainedModel:
    """The converted model with fresh parameters."""
    converted = swap(original, {each.layer: (each.build(), each.keep) for each in conversion.layers})
    if conversion.lora:
        add_lora(converted, conversion.lora)
    mark(converted, conversion)
    return converted


def describe(
    converted: PreTrainedModel, options: dict[int, dict[str, Any]], plan: Plan, base: Base, lora: int
) -> Conversion:
    """The record of a model just converted; `options` are those its mechanisms were built with, by layer."""
    layers = tuple(
        Layer(
            layer=layer,
            mechanism=part.mechanism.name,
            heads=part.mechanism.heads,
            dim=part.mechanism.dim,
            value_dim=part.mechanism.value_dim,
            options=options[layer],
            keep=tuple(part.keep.tolist()),
        )
        for layer, part in mixed_heads(converted).items()
    )
    return Conversion(base=base, layers=layers, plan=plan, lora=lora, provenance=provenance())
