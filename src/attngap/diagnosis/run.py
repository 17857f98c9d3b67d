"""One diagnosis under way: what its stages share."""

import dataclasses

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel

from attngap.diagnosis.options import DiagnosisOptions
from attngap.engine.cluster import Cluster
from attngap.errors import AttngapError
from attngap.heads.forward import forward, is_language_model
from attngap.models.capture import Call, capture
from attngap.models.mode import tokens_suffice
from attngap.models.plan import Replacement
from attngap.models.positions import layer_positions
from attngap.models.shapes import layer_shapes
from attngap.storage.pieces import Pieces

STRESS = "stress"


@dataclasses.dataclass(frozen=True)
class Shape:
    """Heads of a model, as one short forward pass shows them."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    cross: int  # cross-attention calls
    causal: bool
    is_language_model: bool  # predicts tokens, so damage is a KL divergence; else it is a change of embedding
    linear: int  # heads that an earlier conversion replaced
    obstacles: tuple[str | None, ...]  # why the heads of each layer cannot be replaced


@dataclasses.dataclass(frozen=True)
class DiagnosisRun:
    """One diagnosis under way: the model, its passages, the options, and where pieces go."""

    model: PreTrainedModel
    shape: Shape
    options: DiagnosisOptions
    text: Int[Tensor, "p t"]
    more: list[Int[Tensor, "1 t"]]  # passages for damage only: it varies more with the text than with the labels
    fresh: list[Int[Tensor, "1 t"]]  # text and repeated tokens that no score sees: heads are replaced for real on them
    fresh_stress: list[Int[Tensor, "1 t"]]
    stress: Int[Tensor, "1 t"]
    period: int
    fit_repeats: Int[Tensor, "1 t"]  # other repeated random tokens, for fits only: without any they know text alone
    checkpoint: Pieces
    quiet: bool | None
    cluster: Cluster | None = None  # that computes pieces in this process's stead

    @property
    def replacement(self) -> Replacement:
        """What would stand in for a head."""
        return Replacement(window=self.options.window, sinks=self.options.sinks)

    def passages(self) -> list[tuple[str, Tensor]]:
        """Every passage by name, the stress passage last."""
        return [(str(i), row[None]) for i, row in enumerate(self.text)] + [(STRESS, self.stress)]

    def damaged(self) -> list[tuple[str, Tensor]]:
        """Passages that damage is estimated on."""
        return self.passages() + [(f"more-{i}", tokens) for i, tokens in enumerate(self.more)]


def shape_of(model: PreTrainedModel, tokens: Int[Tensor, "1 t"]) -> Shape:
    """Look at a few tokens: how many layers and heads there are, and whether the model can be watched at all."""
    seen: list[Call] = []
    with tokens_suffice(model), torch.no_grad(), capture(model, lambda call: seen.append(call)):
        forward(model, tokens[:, :8])
    own = [call for call in seen if not call.cross]
    if not own:
        raise AttngapError(f"{type(model).__name__} has no softmax attention: there is no head to look at")
    sizes = {(call.heads, call.kv_heads, call.q.shape[-1]) for call in own}
    if len(sizes) != 1:
        raise AttngapError(
            f"{type(model).__name__} has layers with different heads (heads, key heads, dim): {sorted(sizes)}; "
            "only models whose layers are alike are supported"
        )
    heads, kv_heads, dim = sizes.pop()
    obstacles = [shape.obstacle for shape in layer_shapes(model)]
    layer_positions(model)  # noted for the fits: their features shall be those of a conversion
    return Shape(
        layers=len(own),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        cross=len(seen) - len(own),
        causal=all(call.causal for call in own),
        is_language_model=is_language_model(model),
        linear=sum(len(call.linear) for call in own),
        # Of a layer that was converted before, the kept heads still show what they would cost.
        obstacles=tuple(
            None if 0 < len(call.linear) < call.heads else why for call, why in zip(own, obstacles, strict=True)
        ),
    )
