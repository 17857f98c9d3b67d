"""A plan: which heads keep softmax, what replaces the others, and the damage predicted for every other choice."""

import hashlib
from html import escape
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveInt
from transformers import PreTrainedModel

from attngap.charts.frame import BLUE, ORANGE
from attngap.charts.inline import head_squares
from attngap.errors import AttngapError
from attngap.models.placement import named_weights
from attngap.models.shapes import layer_shapes
from attngap.options import GRANULARITY, SINKS, WINDOW, Granularity
from attngap.storage.files import write_text
from attngap.storage.records import read_record

SCHEMA = "attngap.plan/1"
LARGEST = 2**16  # of windows, sinks, features, layers and heads: what is beyond is no model's


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelFacts(_Strict):
    """What a plan must agree with before it is applied."""

    name: str
    architecture: str
    fingerprint: str
    layers: Annotated[int, Field(gt=0, le=LARGEST)]  # self-attention calls of one forward pass
    heads: Annotated[int, Field(gt=0, le=LARGEST)]  # query heads a layer
    kv_heads: PositiveInt


class Replacement(_Strict):
    """Exact attention to the first `sinks` and the last `window` keys, a feature map for the rest: a `hybrid`."""

    window: Annotated[int, Field(gt=0, le=LARGEST)] = WINDOW
    sinks: Annotated[int, Field(ge=0, le=LARGEST)] = SINKS
    feature_map: str = "prototype"
    features: Annotated[int, Field(gt=0, le=LARGEST)] | None = None  # None: the map's own default
    relative: bool = False
    gain: Literal["none", "head", "query"] = "query"

    def options(self) -> dict[str, Any]:
        """For `attngap.mechanism("hybrid", heads, dim, **options)`."""
        return self.model_dump(exclude={"features"}) | {"map_options": self.map_options()}

    def map_options(self) -> dict[str, Any]:
        return {} if self.features is None else {"features": self.features}


class Expected(_Strict):
    """A predicted figure and the interval in which nine measurements of ten should fall."""

    value: NonNegativeFloat
    low: NonNegativeFloat
    high: NonNegativeFloat


class Point(_Strict):
    """Predicted damage (nats a token, second order, heads added up) when only the best `kept` keep softmax."""

    kept: NonNegativeInt
    text: NonNegativeFloat
    recall: NonNegativeFloat
    # What a model converted so would measure; None where the diagnosis replaced no heads together.
    perplexity_ratio: "Expected | None" = None
    recalled: "Expected | None" = None  # of a repeated random sequence, as a share of what the original predicts


class Plan(_Strict):
    """Heads `[layer, head]` in `keep` stay softmax; every other is replaced."""

    schema_: Literal["attngap.plan/1"] = Field(default=SCHEMA, alias="schema")
    model: ModelFacts
    granularity: Granularity = GRANULARITY
    keep: tuple[tuple[NonNegativeInt, NonNegativeInt], ...] = ()
    replacement: Replacement = Replacement()
    curve: Annotated[tuple[Point, ...], Field(description="one point a keep level, from all kept to none")] = ()
    provenance: dict[str, Any] = {}  # of the diagnosis it was made from, and of the command that wrote it

    @classmethod
    def for_model(
        cls, model: PreTrainedModel, name: str, replacement: Replacement, granularity: Granularity = GRANULARITY
    ) -> "Plan":
        """A plan that replaces every head that can be replaced; a conversion then chooses those it keeps."""
        shapes = layer_shapes(model)
        facts = ModelFacts(
            name=name,
            architecture=architecture(model),
            fingerprint=fingerprint(model),
            layers=len(shapes),
            heads=shapes[0].heads,
            kv_heads=shapes[0].kv_heads,
        )
        fixed = tuple((shape.layer, head) for shape in shapes if shape.obstacle for head in range(shape.heads))
        return cls(model=facts, keep=fixed, replacement=replacement, granularity=granularity)

    def replaced(self) -> list[tuple[int, int]]:
        """The heads that lose softmax, in order."""
        kept = set(self.keep)
        every = ((layer, head) for layer in range(self.model.layers) for head in range(self.model.heads))
        return [place for place in every if place not in kept]

    def __repr_args__(self):
        """A line for people; `model_dump` has everything."""
        yield "model", self.model.name
        yield "keep", f"{len(self.keep)} of {self.model.layers * self.model.heads} heads"
        yield "granularity", self.granularity
        yield "window", self.replacement.window
        yield "feature_map", self.replacement.feature_map

    def _repr_html_(self) -> str:
        """The map of what stays softmax, for a notebook."""
        places = [(*place, "keep softmax") for place in self.keep] + [(*place, "replace") for place in self.replaced()]
        colors = {"keep softmax": ORANGE, "replace": BLUE}
        return f"<div><p><b>{escape(repr(self))}</b></p>{head_squares(places, colors)}</div>"

    def save(self, path: str | Path) -> None:
        write_text(Path(path), self.model_dump_json(by_alias=True, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        plan = read_record(Path(path), cls, what="plan", schema=SCHEMA, hint=f"Write one: attngap plan DIR -o {path}")
        plan.check_places()
        return plan

    def check_places(self) -> None:
        """Every kept head exists, once."""
        for layer, head in self.keep:
            if layer >= self.model.layers or head >= self.model.heads:
                raise AttngapError(
                    f"The plan keeps head {layer}.{head}, but the model has layers 0-{self.model.layers - 1} "
                    f"and heads 0-{self.model.heads - 1}"
                )
        if len(set(self.keep)) < len(self.keep):
            raise AttngapError("The plan keeps a head twice; list each [layer, head] once")

    def check(self, model: PreTrainedModel) -> None:
        """Refuse a plan made for another model, or one that names heads which are not there."""
        self.check_places()
        found = architecture(model)
        if found != self.model.architecture:
            raise AttngapError(
                f"The plan is for {self.model.architecture}, the model is {found}. Diagnose this model first"
            )
        if fingerprint(model) != self.model.fingerprint:
            raise AttngapError(
                f"The plan was made for other weights of {found} ({self.model.name}). Diagnose this model first"
            )


def architecture(model: PreTrainedModel) -> str:
    return type(model).__name__


def fingerprint(model: PreTrainedModel) -> str:
    """Sixteen hex digits of all weights, their names and shapes, rounded so that the dtype does not matter."""
    digest = hashlib.sha256(architecture(model).encode())
    for name, tensor in named_weights(model):
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        digest.update(tensor.to(torch.bfloat16).cpu().contiguous().view(torch.int16).numpy().data)
    return digest.hexdigest()[:16]
