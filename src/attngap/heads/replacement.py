"""What stands in for a layer's heads: window, sinks and features under one normalizer, or a mechanism on its own."""

from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from attngap.errors import AttngapError, unknown
from attngap.heads.inputs import LayerInputs
from attngap.mechanisms.base import Mechanism
from attngap.mechanisms.catalogue import catalogue, mechanism, mechanism_class
from attngap.mechanisms.feature_maps import FEATURE_MAPS, Prototype
from attngap.mechanisms.rotary import Angles
from attngap.models.plan import Replacement
from attngap.models.positions import Positions

MAPS = tuple(each.name for each in FEATURE_MAPS)


@runtime_checkable
class HeadShape(Protocol):
    """What a replacement must fit: a `LayerShape` of a model, or `LayerInputs` of a call."""

    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def dim(self) -> int: ...
    @property
    def value_dim(self) -> int: ...
    @property
    def scale(self) -> float: ...
    @property
    def causal(self) -> bool: ...


def build_replacement(
    shape: HeadShape,
    replacement: Replacement,
    standalone: str | None = None,
    *,
    reach: int | None = None,
    positions: Positions | None = None,
) -> tuple[Mechanism, dict[str, Any]]:
    """The mechanism for one layer, and the options it was built with.

    Where it is known how positions enter queries and keys, features do not see them and may fade with distance; else
    they are read up to position `reach`.
    """
    options: dict[str, Any] = {"kv_heads": shape.kv_heads}
    if standalone is not None:
        name = standalone
        options |= {} if shape.causal else {"causal": False}
    elif shape.causal:
        # Sharing one normalizer with exact logits needs the model's own temperature.
        name, options = "hybrid", options | replacement.options() | {"scale": shape.scale}
        if positions is None or not positions.known:
            options["reach"] = reach
        else:
            options |= positions.options()
            if replacement.feature_map == Prototype.name:
                options["map_options"] = options["map_options"] | {"decay": True}
    else:
        # Bidirectional: features for every pair. A window on both sides would need another op and gains little at
        # the lengths encoders take.
        name, options = replacement.feature_map, options | replacement.map_options() | {"causal": False}
    made = mechanism(name, shape.heads, shape.dim, shape.value_dim, **options)
    return made.to(device_of_shape(shape)), options


def device_of_shape(shape: HeadShape) -> torch.device | None:
    """Where a replacement of this shape is to be: with the queries that were seen, or the layer they come from."""
    return shape.q.device if isinstance(shape, LayerInputs) else getattr(shape, "device", None)


def window_only(shape: HeadShape, window: int, sinks: int, *, relative: bool = False) -> Mechanism:
    """Sinks and window exact, the rest dropped: the baseline that features must beat."""
    near = {"window": window, "sinks": sinks, "scale": shape.scale, "kv_heads": shape.kv_heads, "relative": relative}
    made = mechanism("hybrid", shape.heads, shape.dim, shape.value_dim, feature_map="none", gain="none", **near)
    return made.to(device_of_shape(shape))


def resolve_replacement(
    planned: Replacement, mechanism: str, window: int, sinks: int
) -> tuple[Replacement, str | None]:
    """The planned replacement with these instead of its own; or, for a window of 0, a mechanism that stands alone."""
    if window == 0:
        if mechanism not in catalogue():
            raise unknown("mechanism", mechanism, catalogue(), "List them: attngap mechanisms")
        if mechanism_class(mechanism).gated:
            raise AttngapError(
                f"{mechanism} needs gates computed from the layer's input, which attention does not see. "
                f"Choose one without gates, such as {', '.join(MAPS[-2:])}"
            )
        return planned, mechanism
    if mechanism not in MAPS:
        if mechanism in catalogue():
            raise AttngapError(
                f"{mechanism} is no feature map, so it cannot share a normalizer with a window. Pass window=0 "
                f"(--window 0) to use it alone, or one of: {', '.join(MAPS)}"
            )
        raise unknown("feature map", mechanism, MAPS)
    features = planned.features if mechanism == planned.feature_map else None
    changes = {"feature_map": mechanism, "features": features, "window": window, "sinks": sinks}
    return Replacement.model_validate(planned.model_dump() | changes), None


def output(replacement: Mechanism, inputs: LayerInputs) -> Float[Tensor, "h t dv"]:
    """The replacement's output on one sequence."""
    q, k, v = streams([inputs])
    with torch.no_grad():
        return replacement(None, q, k, v, rotary=angles([inputs]))[0][0]


def streams(batch: Iterable[LayerInputs]) -> tuple[Tensor, Tensor, Tensor]:
    """Sequences of one length as (b, h, t, d). Mechanisms divide logits by sqrt(d); the model's own scale is in q."""
    batch = list(batch)
    width = batch[0].dim ** 0.5
    return (
        torch.stack([inputs.q for inputs in batch]) * width,
        torch.stack([inputs.k for inputs in batch]),
        torch.stack([inputs.v for inputs in batch]),
    )


def angles(batch: Iterable[LayerInputs]) -> Angles | None:
    """The cos and sin of the same sequences, (b, t, w) each."""
    found = [inputs.rotary for inputs in batch]
    if any(each is None for each in found):
        return None
    return torch.cat([each[0] for each in found if each]), torch.cat([each[1] for each in found if each])


def relative_error(found: Float[Tensor, "h t dv"], exact: Float[Tensor, "h t dv"]) -> Float[Tensor, " h"]:
    """||found - exact||^2 / ||exact||^2 of each head."""
    return (found - exact).square().sum((-2, -1)) / exact.square().sum((-2, -1)).clamp(min=1e-30)
