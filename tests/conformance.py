"""What must hold of a converted model, whatever its architecture: one row of docs/models.md each."""

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

import attngap
from attngap import mechanism
from attngap.errors import AttngapError, pip_install
from attngap.models.capture import capture
from attngap.models.compat import DynamicCache
from attngap.models.load import load_model
from attngap.models.plan import ModelFacts, Plan, Replacement, architecture, fingerprint
from attngap.models.save import Base, conversion_record, set_conversion
from attngap.models.shapes import LayerShape, check_replaceable, layer_shapes
from attngap.models.swap import swap
from tests.zoo import tokenizer
from tests.zoo_architectures import Architecture

LENGTH = 24
CLOSE = 2e-3  # of the largest logit; models that sum experts or states in another order are given their own distance


@dataclasses.dataclass
class Row:
    """`refused` is the line that ends it; `checks` by name: how far apart, relative to the largest output."""

    architecture: Architecture
    layers: int = 0
    replaced: int = 0
    checks: dict[str, float] = dataclasses.field(default_factory=dict)
    bounds: dict[str, float] = dataclasses.field(default_factory=dict)
    refused: str | None = None
    unbuilt: str | None = None

    def faults(self) -> list[str]:
        return [
            f"{name}: {apart:.2g}" for name, apart in self.checks.items() if not apart <= self.bounds.get(name, CLOSE)
        ]


def row(each: Architecture) -> Row:
    """Everything about one architecture; an error that is no AttngapError goes through."""
    found = Row(each)
    try:
        model = each.build()
    except Exception as error:  # of transformers: no model without another library, or not at all
        found.refused = refusal(each)
        found.unbuilt = None if found.refused else str(error).strip().splitlines()[0]
        return found
    try:
        _fill(found, model)
    except AttngapError as error:
        found.refused = str(error)
    return found


def refusal(each: Architecture) -> str | None:
    """The line with which a folder of this class is refused, if it is; its config decides before weights are read."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            config = each.config()
            config.architectures = [each.class_name]
            config.save_pretrained(folder)
        except Exception:  # of transformers: not even a config
            return None
        save_file({"weight": torch.zeros(1)}, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        try:
            load_model(folder)
        except AttngapError as error:
            return str(error).replace(folder, each.class_name).replace(pip_install(), "pip install")
    return None


def _fill(found: Row, model: PreTrainedModel) -> None:
    shapes = layer_shapes(model)
    tokens = torch.randint(4, 90, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    if _calls(model, tokens) != len(shapes):
        found.checks["captured"] = 1.0
    check_replaceable(model, shapes)
    found.layers, found.replaced = len(shapes), sum(shape.obstacle is None for shape in shapes)
    exact = outputs(model, tokens)
    found.checks["null plan"] = apart(outputs(swap(model, {}), tokens), exact)
    found.bounds["null plan"] = 0.0
    converted, options = convert(model, shapes)
    whole = outputs(converted, tokens)
    found.checks["converted"] = 0.0 if torch.isfinite(whole).all() and apart(whole, exact) > 1e-6 else 1.0
    found.checks["original unchanged"] = apart(outputs(model, tokens), exact)
    found.bounds["original unchanged"] = 0.0
    if any(shape.cache is not None for shape in shapes):
        found.bounds["cache"] = max(CLOSE, 3 * apart(in_pieces(model, tokens), exact))
        found.checks["cache"] = apart(in_pieces(converted, tokens), whole)
    for side in ("left", "right"):
        own = padded(model, tokens, side)
        if own is not None:
            found.bounds[f"{side} padding"] = max(CLOSE, 3 * apart(own, exact))
            found.checks[f"{side} padding"] = apart(padded(converted, tokens, side), whole)
    found.checks["saved"] = apart(saved(model, converted, options, tokens), whole)
    found.bounds["saved"] = 1e-6


def convert(model: PreTrainedModel, shapes: list[LayerShape]) -> tuple[PreTrainedModel, dict[int, dict[str, Any]]]:
    """Every layer that can be replaced is, all its heads but the first; with the options each was built with."""
    layers, options = {}, {}
    for shape in (shape for shape in shapes if shape.obstacle is None):
        given: dict[str, Any] = {"kv_heads": shape.kv_heads}
        if shape.causal:
            given |= {"feature_map": "prototype", "window": 5, "sinks": 2, "relative": False, "gain": "query"}
            given |= {"scale": shape.scale}
        else:
            given |= {"causal": False}
        new = mechanism("hybrid" if shape.causal else "prototype", shape.heads, shape.dim, shape.value_dim, **given)
        with torch.no_grad():
            for weight in new.parameters():
                weight.add_(0.3 * torch.randn_like(weight))
        layers[shape.layer], options[shape.layer] = (new, [0]), given
    return swap(model, layers), options


def given(model: PreTrainedModel, tokens: Tensor, **more: Any) -> dict[str, Any]:
    found = {"input_ids": tokens, **more}
    if model.config.is_encoder_decoder:
        found["decoder_input_ids"] = tokens
        if "attention_mask" in more:
            found["decoder_attention_mask"] = more["attention_mask"]
    return found


@torch.no_grad()
def outputs(model: PreTrainedModel, tokens: Tensor, **more: Any) -> Tensor:
    cache = {"use_cache": False} if getattr(model.config.get_text_config(), "use_cache", None) is not None else {}
    result = model(**given(model, tokens, **more), **cache)
    return result.logits if getattr(result, "logits", None) is not None else result.last_hidden_state


@torch.no_grad()
def in_pieces(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """A prompt and then token by token, through a cache."""
    cache, pieces = DynamicCache(config=model.config), []
    for piece in tokens.split([LENGTH - 6, 1, 1, 1, 1, 1, 1], 1):
        pieces.append(model(input_ids=piece, past_key_values=cache, use_cache=True).logits)
    return torch.cat(pieces, 1)


def padded(model: PreTrainedModel, tokens: Tensor, side: str) -> Tensor | None:
    """Outputs of the real tokens; None for a class that knows no mask or positions."""
    filler = torch.zeros(len(tokens), 5, dtype=torch.long)
    real = torch.ones_like(tokens)
    batch, mask = (torch.cat((filler, x) if side == "left" else (x, filler), 1) for x in (tokens, real))
    more: dict[str, Any] = {"attention_mask": mask}
    import inspect

    names = inspect.signature(model.forward).parameters
    if "attention_mask" not in names:
        return None
    if side == "left":
        if "position_ids" not in names or model.config.is_encoder_decoder:
            return None
        more["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    found = outputs(model, batch, **more)
    return found[:, 5:] if side == "left" else found[:, :LENGTH]


def saved(model: PreTrainedModel, converted: PreTrainedModel, options: dict, tokens: Tensor) -> Tensor:
    """Outputs of the model after it was written to disk and read again."""
    with tempfile.TemporaryDirectory() as folder:
        words = tokenizer()
        model.save_pretrained(Path(folder) / "base")
        words.save_pretrained(Path(folder) / "base")
        name = str(Path(folder) / "base")
        set_conversion(
            converted, conversion_record(converted, options, plan(model, name), Base.of(model, name), lora=0)
        )
        attngap.save(converted, Path(folder) / "converted", tokenizer=words)
        again, _ = attngap.load(Path(folder) / "converted")
        return outputs(again, tokens)


def plan(model: PreTrainedModel, name: str) -> Plan:
    shapes = layer_shapes(model)
    facts = ModelFacts(
        name=name,
        architecture=architecture(model),
        fingerprint=fingerprint(model),
        layers=len(shapes),
        heads=max(shape.heads for shape in shapes),
        kv_heads=max(shape.kv_heads for shape in shapes),
    )
    return Plan(model=facts, replacement=Replacement(window=5, sinks=2))


def apart(found: Tensor | None, exact: Tensor) -> float:
    assert found is not None
    return float((found - exact).abs().max() / exact.abs().max())


def _calls(model: PreTrainedModel, tokens: Tensor) -> int:
    seen: list[int] = []
    with capture(model, lambda call: None if call.cross else seen.append(call.layer)):
        outputs(model, tokens)
    return len(seen)
