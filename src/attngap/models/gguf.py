"""Read a GGUF file: dequantized once into a plain Hugging Face folder, which is kept, and checked at every use."""

import contextlib
import hashlib
import json
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from filelock import FileLock
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from attngap.errors import AttngapError, missing_extra
from attngap.progress import Advance, progress

HASHES = "sha256.json"  # written last: a folder without it is unfinished
WEIGHTS = "model.safetensors"


@contextlib.contextmanager
def plain_folder(path: Path) -> Iterator[Path]:
    """The model of a .gguf file as a Hugging Face folder in float32, to be loaded while the context is open.

    It is kept in the cache. Where that cannot be written the folder is a temporary one.
    """
    _check_kind(path)
    with contextlib.ExitStack() as stack:
        try:
            folder = _kept(path)
        except (OSError, SafetensorError) as error:  # safetensors reports a full disk as its own error
            why = str(error).strip().splitlines()[0]
            warnings.warn(f"Could not keep the dequantized model in '{cache_folder()}': {why}", stacklevel=4)
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="attngap-")))
            _translate(path, folder)
        yield folder


def _check_kind(path: Path) -> None:
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise AttngapError(f"'{path}' is not a GGUF file: it does not begin with 'GGUF'")
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise missing_extra("GGUF files need", "demo") from None


def _kept(path: Path) -> Path:
    """The folder in the cache, made anew when it is missing or is not as it was written."""
    # The version is part of the name: how transformers reads config and tokenizer may change.
    kept = cache_folder() / f"gguf-{_sha256(path)[:24]}-{transformers.__version__}"
    if intact(kept):
        return kept
    kept.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{kept}.lock"):  # held by the operating system, so a killed process leaves no lock behind
        if intact(kept):  # another process made it meanwhile
            return kept
        draft = kept.with_name(f"{kept.name}.draft")
        for left_over in (draft, kept):
            if left_over.exists():
                shutil.rmtree(left_over)
        draft.mkdir()
        try:
            _translate(path, draft)
            (draft / HASHES).write_text(json.dumps({file.name: _sha256(file) for file in draft.iterdir()}))
            draft.rename(kept)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return kept


def intact(folder: Path) -> bool:
    """Is every file as it was written? Half a second for 135M parameters."""
    try:
        hashes = json.loads((folder / HASHES).read_text())
        return WEIGHTS in hashes and all(_sha256(folder / name) == written for name, written in hashes.items())
    except (OSError, ValueError, TypeError, AttributeError):
        return False


def _translate(path: Path, folder: Path) -> None:
    source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name, "trust_remote_code": False}
    with progress(f"reading {path.name}", total=100) as advance:
        with _explained(path):
            config: Any = AutoConfig.from_pretrained(**source)
            advance(10, note="tokenizer")
            tokenizer = AutoTokenizer.from_pretrained(**source)
            advance(10, note="weights")
            tensors = _tensors(path, config, advance)
        config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        with _explained(path):
            _check_complete(folder)
        advance(10)


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """What is wrong inside a GGUF file surfaces as any kind of error, from struct's to a misspelt name."""
    try:
        yield
    except Exception as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise AttngapError(
            f"Cannot read the GGUF file '{path}': {first}. If it was downloaded, compare its size with the source's; "
            "else try the model's Hugging Face folder"
        ) from error


def _tensors(path: Path, config: Any, advance: Advance) -> dict[str, torch.Tensor]:
    """Dequantized by the gguf package, under the names and in the layout that transformers gives them."""
    import gguf
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    reader = gguf.GGUFReader(path)
    layers = config.num_hidden_layers
    if not 0 < layers <= len(reader.tensors):  # before a model of a billion layers is built
        raise ValueError(f"it claims {layers} layers and holds {len(reader.tensors)} tensors")
    field = reader.get_field("general.architecture")
    architecture = field.contents() if field else ""
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=config.to_dict())
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    config.architectures = [type(model).__name__]
    names = get_gguf_hf_weights_map(model, processor)
    tensors: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        result = processor.process(
            weights=gguf.dequantize(tensor.data, tensor.tensor_type),
            name=tensor.name,
            tensor_key_mapping=names,
            parsed_parameters={"tensors": tensors},  # where experts are put together
        )
        if result.name in names:
            tensors[names[result.name]] = torch.tensor(result.weights, dtype=torch.float32)
        advance(70 / len(reader.tensors))
    return tensors


def _check_complete(folder: Path) -> None:
    """A model with a tensor missing would load with random numbers in its place."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    info = loaded[1]
    if missing := sorted(info["missing_keys"]):
        raise ValueError(f"it lacks {missing[0]} and {len(missing) - 1} more tensors")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def cache_folder() -> Path:
    """ATTNGAP_CACHE, or attngap's folder in the platform's user cache."""
    if chosen := os.environ.get("ATTNGAP_CACHE"):
        return Path(chosen)
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local"))
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return base / "attngap"
