"""The sizes of a model that costs depend on, from its config: nothing is loaded, no number is computed."""

import contextlib
import copy
import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from attngap.errors import AttngapError
from attngap.heads.forward import predicts_next
from attngap.models.load import load_config, model_class
from attngap.models.shapes import layer_shapes

KEPT = ("hidden_size", "n_embd", "d_model")  # what families call the width of a state


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """A decoder's sizes."""

    name: str
    parameters: int
    layer_parameters: int  # of one layer
    head_parameters: int  # of the output layer, tied or not: what a token's logits multiply with
    layers: int
    replaceable: int  # layers whose heads can be replaced
    heads: int
    kv_heads: int
    dim: int
    hidden: int
    vocabulary: int
    positions: int | None

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Some classes need a library, or look at numbers that only a model with its weights has."""
    try:
        yield
    except AttngapError:
        raise
    except Exception as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise AttngapError(
            f"Its sizes cannot be told from its config alone: {why}. See for yourself: attngap diagnose MODEL --quick"
        ) from error


def shape_of(model: str | os.PathLike[str] | PretrainedConfig, *, trust_remote_code: bool = False) -> ModelShape:
    """Of a folder, an id, a .gguf file, an alias, or a config of transformers.

    The model is built on torch's meta device, where tensors have shapes and no numbers, and runs two tokens there.
    """
    named = not isinstance(model, PretrainedConfig)
    config: Any = load_config(model, trust_remote_code=trust_remote_code) if named else copy.deepcopy(model)
    config.get_text_config().pad_token_id = None  # some look for it among the tokens, which have no numbers here
    name = str(model) if named else str(config.name_or_path or config.model_type)
    with torch.device("meta"), _told():
        kind = model_class(config)
        built = kind(config) if issubclass(kind, PreTrainedModel) else kind.from_config(config)
    assert isinstance(built, PreTrainedModel)
    if not predicts_next(built) or config.is_encoder_decoder:
        raise AttngapError(
            f"estimate knows decoders that write text; {type(built).__name__} is another kind. Small ones are "
            "diagnosed in a minute: attngap diagnose MODEL --quick"
        )
    with _told():
        found = layer_shapes(built.eval())
    text = config.get_text_config()
    sizes = {(each.heads, each.kv_heads, each.dim) for each in found}
    if len(sizes) != 1:
        raise AttngapError(
            f"{type(built).__name__} has layers with different heads (heads, key heads, dim): {sorted(sizes)}; only "
            "models whose layers are alike are supported"
        )
    heads, kv_heads, dim = sizes.pop()
    output = built.get_output_embeddings()
    assert output is not None  # it predicts tokens
    whole = sum(p.numel() for p in built.parameters())
    ends = {
        id(p): p.numel()
        for part in (output, built.get_input_embeddings())
        if part is not None
        for p in part.parameters()
    }
    return ModelShape(
        name=name,
        parameters=whole,
        layer_parameters=(whole - sum(ends.values())) // len(found),
        head_parameters=sum(p.numel() for p in output.parameters()),
        layers=len(found),
        replaceable=sum(each.obstacle is None for each in found),
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        hidden=next(int(getattr(text, key)) for key in KEPT if hasattr(text, key)),
        vocabulary=int(text.vocab_size),
        positions=getattr(text, "max_position_embeddings", None),
    )
