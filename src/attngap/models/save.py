"""Converted models on disk: a small adapter beside the base model's name and hash, or a folder that stands alone."""

import hashlib
import json
import os
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
from attngap.models.load import ALIASES, load_model, load_tokenizer, may_be_on_a_hub, on_device
from attngap.models.lora import add_lora
from attngap.models.mixed import mixed_heads
from attngap.models.placement import named_weights
from attngap.models.plan import Plan, architecture
from attngap.models.settings import changed, settings
from attngap.models.swap import swap
from attngap.models.twin import CHILD, undone
from attngap.provenance import provenance

SCHEMA, BEFORE = "attngap.conversion/2", "attngap.conversion/1"
LARGEST = 2**26  # bytes of a record: a thousand layers take a thousandth of it
ALWAYS = {"feature_map", "window", "sinks", "relative", "gain"}  # of a hybrid's options, in every record
RECORD, WEIGHTS, BASE, CARD = "attngap.json", "adapter.safetensors", "base", "README.md"


class _Strict(BaseModel):
    # A number is a number and a truth a truth: "no" is not False, and "64" is no window.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Base(_Strict):
    """The original model: how to load it, a hash of all its weights, and what its config says."""

    name: str  # what `attngap.load` takes; "base" is the folder inside this one, ./ and ../ are seen from it
    architecture: str
    sha256: str
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"  # in which these are the weights' values
    config: dict[str, Any] = {}  # settings that change what it computes; records of before have none

    @classmethod
    def of(cls, model: PreTrainedModel, name: str) -> "Base":
        """What is to be recorded about a model that `attngap.load` finds by this name."""
        facts = {"name": name, "architecture": architecture(model), "dtype": dtype_name(model)}
        return cls(**facts, sha256=weights_hash(model), config=settings(model.config))


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
        try:
            return mechanism(self.mechanism, self.heads, self.dim, self.value_dim, **self.options)
        except (TypeError, ValueError, RuntimeError, MemoryError) as error:  # options may be of any type and size
            why = (str(error).splitlines() or [type(error).__name__])[0]
            raise AttngapError(
                f"Layer {self.layer} cannot be replaced by {self.mechanism!r} as recorded: {why}"
            ) from error


class Conversion(_Strict):
    """attngap.json: everything needed to put a converted model together again."""

    schema_: Literal["attngap.conversion/2"] = Field(default=SCHEMA, alias="schema")
    base: Base
    layers: tuple[Layer, ...]
    plan: Plan
    lora: NonNegativeInt  # rank; zero means none
    adapter: str = ""  # sha256 of the adapter's file
    seal: str = ""  # sha256 of all above but the base's name, which may move
    provenance: dict[str, Any] = {}

    def sealed(self, adapter: str) -> "Conversion":
        """As it is written: with the hashes that tell a damaged or edited folder."""
        named = self.model_copy(update={"adapter": adapter})
        return named.model_copy(update={"seal": named.hash()})

    def hash(self) -> str:
        content = self.model_dump(mode="json", by_alias=True, exclude={"seal": True, "provenance": True})
        content["base"].pop("name")
        if content["base"]["dtype"] == "float32":
            content["base"].pop("dtype")  # records of before have none
        if not content["base"]["config"]:
            content["base"].pop("config")
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def set_conversion(model: PreTrainedModel, conversion: Conversion, folder: Path | None = None) -> None:
    """Let the model know, for `conversion_of` and `save`, how it was converted, and from which folder it was loaded."""
    object.__setattr__(model, "conversion", conversion)
    object.__setattr__(model, "conversion_folder", folder)


def conversion_of(model: PreTrainedModel) -> Conversion:
    """How this model was converted; an error for one that was not."""
    found = getattr(model, "conversion", None)
    if not isinstance(found, Conversion):
        raise AttngapError(
            f"This {type(model).__name__} was not converted by attngap. Convert it: attngap.linearize, then save"
        )
    return found


def dtype_name(model: PreTrainedModel) -> Any:
    """Of the weights that are numbers; quantized ones, say, are float32 where they are read."""
    found = str(model.dtype).removeprefix("torch.")
    return found if found in ("bfloat16", "float16", "float64") else "float32"


def weights_hash(model: PreTrainedModel) -> str:
    """sha256 of every weight's name, shape and float32 values."""
    digest = hashlib.sha256(architecture(model).encode())
    for name, tensor in named_weights(model):
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        digest.update(tensor.float().cpu().contiguous().numpy().data)
    return digest.hexdigest()


def save(
    model: PreTrainedModel,
    directory: str | Path,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    original: PreTrainedModel | None = None,
    card: str | None = None,
    place: str | Path | None = None,
) -> None:
    """Write a converted model: the adapter alone, or with the `original` beside it a folder that needs nothing else.

    Where the base's weights are no longer those it was converted from, because it was trained or cast, or are nowhere
    else on disk, they are written too, whether asked for or not: a folder loads as the model that was saved. `place` is
    where the folder will stand, if it is written somewhere else first: a relative path to the base is seen from there.

    >>> attngap.save(converted, "smollm2-linear", tokenizer=tokenizer)  # doctest: +SKIP
    """
    conversion = conversion_of(model)
    folder = Path(directory)
    place = Path(directory if place is None else place)
    plain = undone(model)
    found = weights_hash(plain)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        name = _seen_from(place, model, conversion.base.name)
        if original is not None or found != conversion.base.sha256 or name is None:
            plain.save_pretrained(folder / BASE)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder / BASE)
            facts = {"dtype": dtype_name(plain), "config": settings(plain.config)}
            base = conversion.base.model_copy(update={"name": BASE, "sha256": found, **facts})
        else:
            base = conversion.base.model_copy(update={"name": name})
        save_file(_adapter(model), folder / WEIGHTS, metadata={"format": "pt"})
        conversion = conversion.model_copy(update={"base": base}).sealed(_file_hash(folder / WEIGHTS))
        config = config_json(conversion.base.architecture)
        (folder / CODE_FILE).write_text(CODE, encoding="utf-8")
        (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
        (folder / RECORD).write_text(conversion.model_dump_json(by_alias=True, indent=1) + "\n", encoding="utf-8")
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        if card is not None:
            (folder / CARD).write_text(card, encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise AttngapError(f"Cannot write the model to '{place}': {error}. Choose another folder") from error


def _seen_from(place: Path, model: PreTrainedModel, name: str) -> str | None:
    """The base's name for a folder at `place`; None for weights that a folder there would not find by any name.

    A relative path is as it is seen from there, so that both can move and nobody takes it for a hub's name.
    """
    loaded: Path | None = vars(model).get("conversion_folder")
    if loaded is not None and name == BASE:  # a folder that stands alone stays one, wherever it is saved again
        return BASE if loaded.resolve() == place.resolve() else None
    seen_from_loaded = loaded is not None and name.startswith(("./", "../"))
    path = loaded / name if loaded is not None and seen_from_loaded else Path(name).expanduser()
    if not name or not (path.exists() or may_be_on_a_hub(name)):
        return None
    if (path.is_absolute() and not seen_from_loaded) or name in ALIASES or not path.exists():
        return name
    found = Path(os.path.relpath(path.resolve(), place.resolve())).as_posix()
    return found if found.startswith(".") else f"./{found}"


def _file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _adapter(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """What the base model does not have: the replacements' parameters and LoRA's."""
    return {
        name: tensor.detach().contiguous()
        for name, tensor in model.state_dict().items()
        if f".{CHILD}." in name or ".lora_" in name
    }


def load_converted(
    directory: str | Path, *, base: str | None = None, dtype: torch.dtype | None = None, **options: Any
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The converted model and its tokenizer. `base` says where the base model is now, if it has moved."""
    folder = Path(directory)
    model = load_converted_model(folder, base=base, dtype=dtype, **options)
    own = (folder / "tokenizer_config.json").exists()
    source = str(folder) if own else base_source(folder, read_record(folder), base)
    return model, load_tokenizer(source, **options)


def load_converted_model(
    folder: Path, *, base: str | None = None, dtype: torch.dtype | str | None = None, **options: Any
) -> PreTrainedModel:
    """The converted model alone; `options` are those of `attngap.load`, for the base model."""
    conversion = read_record(folder)
    weights = _read_adapter(folder, conversion)
    _check_size(folder, conversion, weights)
    dtype = None if dtype == "auto" else dtype  # what it was converted in
    converted = assemble(load_base_model(folder, conversion, base, dtype=dtype, **options), conversion)
    wanted = _adapter(converted)
    for name in sorted(set(wanted) | set(weights)):
        one, other = (None if x is None else (tuple(x.shape), x.dtype) for x in (wanted.get(name), weights.get(name)))
        if one != other:
            raise AttngapError(
                f"'{folder / WEIGHTS}' does not match its {RECORD}: {name!r} should be {one}, is {other}. "
                "Convert the model again"
            )
    converted.load_state_dict(weights, strict=False)
    set_conversion(converted, _located(conversion, base), folder.resolve())
    if isinstance(dtype, torch.dtype):
        converted.to(dtype=dtype)  # pyright: ignore[reportCallIssue]
    return converted.eval()


def _located(conversion: Conversion, base: str | None) -> Conversion:
    """With the base's name of today, where it had moved."""
    if base is None:
        return conversion
    name = str(Path(base).resolve()) if Path(base).exists() else base
    return conversion.model_copy(update={"base": conversion.base.model_copy(update={"name": name})})


def _check_size(folder: Path, conversion: Conversion, weights: dict[str, torch.Tensor]) -> None:
    """Before memory is asked for: the adapter holds as many numbers as the record's replacements have."""
    with torch.device("meta"):
        wanted = sum(x.numel() for each in conversion.layers for x in each.build().state_dict().values())
    found = sum(x.numel() for x in weights.values())
    if conversion.lora and not any(".lora_A." in name and len(x) == conversion.lora for name, x in weights.items()):
        raise AttngapError(
            f"'{folder / WEIGHTS}' does not match its {RECORD}: it has no LoRA of rank {conversion.lora}"
        )
    if wanted > found:
        raise AttngapError(
            f"'{folder / WEIGHTS}' does not match its {RECORD}: {wanted} numbers are recorded, {found} are there. "
            "Convert the model again"
        )


def _read_adapter(folder: Path, conversion: Conversion) -> dict[str, torch.Tensor]:
    path = folder / WEIGHTS
    try:
        found = _file_hash(path)
        if found != conversion.adapter:
            raise AttngapError(
                f"'{path}' is damaged or another conversion's: sha256 {conversion.adapter[:12]}... expected, "
                f"{found[:12]}... found. Copy or convert the model again"
            )
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise AttngapError(f"Cannot read '{path}': {error}. Convert the model again") from error


def base_source(folder: Path, conversion: Conversion, base: str | None = None) -> str:
    """Where the base model is: given, inside the folder, seen from the folder, or a name that `attngap.load` takes."""
    name = conversion.base.name
    if base is not None:
        return base
    if not name or "\0" in name:
        raise AttngapError(f"'{folder}' names {name!r} as the model it was converted from. Give the base model")
    inside = name == BASE or name.startswith(("./", "../"))
    source = str((folder / name).resolve()) if inside else name
    if Path(source).expanduser().resolve() == folder.resolve():
        raise AttngapError(f"'{folder}' names itself as the model it was converted from. Give the base model")
    return source


def load_base(
    folder: Path,
    conversion: Conversion,
    base: str | None = None,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model a folder was converted from, its weights checked against the hash, and its tokenizer."""
    model = on_device(load_base_model(folder, conversion, base, dtype=dtype), device)
    own = (folder / "tokenizer_config.json").exists()
    return model, load_tokenizer(str(folder) if own else base_source(folder, conversion, base))


def load_base_model(
    folder: Path,
    conversion: Conversion,
    base: str | None = None,
    *,
    dtype: torch.dtype | str | None = None,
    **options: Any,
) -> PreTrainedModel:
    """The model a folder was converted from, its weights checked against the hash.

    It is read in the precision that is asked for at once, if its weights have those very values in it: one copy.
    """
    source = base_source(folder, conversion, base)
    own: torch.dtype = getattr(torch, conversion.base.dtype)
    asked = dtype if isinstance(dtype, torch.dtype) else own
    try:
        original = load_model(source, dtype=asked, **options)
        found = weights_hash(original)
        if found != conversion.base.sha256 and asked != own:
            del original
            original = load_model(source, dtype=own, **options)
            found = weights_hash(original)
            original.to(dtype=asked)  # pyright: ignore[reportCallIssue]
    except AttngapError as error:
        raise AttngapError(f"'{folder}' is an adapter of {source!r}, which did not load. {error}") from error
    if found != conversion.base.sha256:
        raise AttngapError(
            f"'{folder}' was made from other weights than {source!r} has: sha256 {conversion.base.sha256[:12]}... "
            f"expected, {found[:12]}... found. Give the base model it was made from"
        )
    if other := changed(conversion.base.config, original.config):
        raise AttngapError(
            f"'{folder}' was made from {source!r} with another config: {other}. Give the base model it was made from"
        )
    return original


def _validated(text: str, folder: Path) -> Conversion:
    """The record; one of the schema before, which had no hashes, gets those of the files as they are."""
    if f'"{BEFORE}"' not in text:
        return Conversion.model_validate_json(text)
    try:
        written = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise AttngapError(f"'{folder / RECORD}' is not JSON: {error}. Convert the model again") from error
    content = {"lora": 0} | (written if isinstance(written, dict) else {}) | {"schema": SCHEMA}
    if content.keys() & {"seal", "adapter"}:
        raise AttngapError(f"'{folder / RECORD}' was changed after it was written. Convert the model again")
    found = Conversion.model_validate_json(json.dumps(content))
    for each in found.layers:
        if missing := ALWAYS - each.options.keys() if each.mechanism == "hybrid" else set():
            raise AttngapError(f"'{folder / RECORD}' lacks {min(missing)!r} of layer {each.layer}. Convert it again")
    return found.sealed(_file_hash(folder / WEIGHTS))


def read_record(folder: Path) -> Conversion:
    """attngap.json, checked: of this version, with every field of its own type, and as it was written."""
    path = folder / RECORD
    try:
        if not path.is_file():  # a pipe would be waited for
            raise AttngapError(f"'{folder}' is not a converted model: it has no {RECORD}. Write one: attngap linearize")
        if path.stat().st_size > LARGEST:
            raise AttngapError(f"'{path}' has {path.stat().st_size} bytes; a record has a few thousand")
        found = _validated(path.read_text(encoding="utf-8"), folder)
    except (OSError, UnicodeDecodeError) as error:
        raise AttngapError(f"'{folder}' is not a converted model: {error}. Write one: attngap linearize") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise AttngapError(f"'{path}' is wrong at {place!r}: {first['msg']}. Convert the model again") from error
    if found.hash() != found.seal:
        raise AttngapError(f"'{path}' was changed after it was written. Convert the model again")
    return found


def assemble(original: PreTrainedModel, conversion: Conversion) -> PreTrainedModel:
    """The converted model with fresh parameters."""
    converted = swap(original, {each.layer: (each.build(), each.keep) for each in conversion.layers})
    if conversion.lora:
        add_lora(converted, conversion.lora)
    set_conversion(converted, conversion)
    return converted


def conversion_record(
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
