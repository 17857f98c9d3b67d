"""Build each layer's replacement: window, sinks and features under one normalizer, or a catalogue mechanism alone."""

from typing import Any

from attngap.errors import AttngapError, unknown
from attngap.mechanisms.base import Mechanism
from attngap.mechanisms.catalogue import catalogue, mechanism, mechanism_class
from attngap.mechanisms.feature_maps import FEATURE_MAPS
from attngap.models.plan import Replacement
from attngap.models.swap import LayerShape

MAPS = tuple(each.name for each in FEATURE_MAPS)


def choose_replacement(
    planned: Replacement, *, mechanism: str | None, window: int | None, sinks: int | None
) -> tuple[Replacement, str | None]:
    """The plan's replacement with what the caller overrides; and a mechanism that stands alone, when window is 0."""
    name = mechanism or planned.feature_map
    changes: dict[str, Any] = {"feature_map": name, "features": planned.features if mechanism is None else None}
    if sinks is not None:
        changes["sinks"] = sinks
    if window is not None:
        changes["window"] = window
    if window == 0:
        if name not in catalogue():
            raise unknown("mechanism", name, catalogue(), "List them: attngap mechanisms")
        if mechanism_class(name).gated:
            raise AttngapError(
                f"{name} needs gates computed from the layer's input, which attention does not see. "
                f"Choose one without gates, such as {', '.join(MAPS[-2:])}"
            )
        return planned, name
    if name not in MAPS:
        if name in catalogue():
            raise AttngapError(
                f"{name} is no feature map, so it cannot share a normalizer with a window. Pass window=0 (--window 0) "
                f"to use it alone, or one of: {', '.join(MAPS)}"
            )
        raise unknown("feature map", name, MAPS)
    return Replacement.model_validate(planned.model_dump() | changes), None


def build(
    shape: LayerShape, replacement: Replacement, alone: str | None, *, reach: int | None = None
) -> tuple[Mechanism, dict[str, Any]]:
    """The mechanism for one layer, and the options it was built with. Features are read up to position `reach`."""
    options: dict[str, Any] = {"kv_heads": shape.kv_heads}
    if alone is not None:
        name = alone
        options |= {} if shape.causal else {"causal": False}
    elif shape.causal:
        # Sharing one normalizer with exact logits needs the model's own temperature.
        name, options = "hybrid", options | replacement.options() | {"scale": shape.scale, "reach": reach}
    else:
        # Bidirectional: features for every pair. A window on both sides would need another op and gains little at
        # the lengths encoders take.
        name, options = replacement.feature_map, options | replacement.map_options() | {"causal": False}
    return mechanism(name, shape.heads, shape.dim, shape.value_dim, **options), options
