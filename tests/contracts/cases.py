"""Every mechanism of the catalogue, by default and with its options, small enough to check in milliseconds."""

from typing import Any

from attngap import catalogue, mechanism
from attngap.mechanisms.base import Mechanism
from attngap.mechanisms.feature_maps import FEATURE_MAPS

SMALL_HYBRID = {"window": 3, "sinks": 1}
BIDIRECTIONAL = (
    "softmax",
    "linear",
    "elu",
    "relu",
    "polynomial",
    "taylor",
    "favor",
    "rff",
    "cosformer",
    "hedgehog",
    "inline",
    "mala",
)


def default_options(name: str) -> dict[str, Any]:
    """A window shorter than the test's sequences, so that far keys exist."""
    return dict(SMALL_HYBRID) if name == "hybrid" else {}


CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, default_options(name)) for name in catalogue()),
    *((name, {"causal": False, "kv_heads": 2}) for name in BIDIRECTIONAL),
    ("softmax", {"scale": 0.3, "kv_heads": 1}),
    ("elu", {"kv_heads": 1}),
    ("polynomial", {"degree": 1}),
    ("polynomial", {"degree": 3, "kv_heads": 2}),
    ("favor", {"features": 7, "seed": 5, "kv_heads": 2}),
    ("rff", {"features": 3, "sigma": 0.7, "kv_heads": 2}),
    ("cosformer", {"length": 60, "kv_heads": 2}),
    ("hedgehog", {"features": 3, "kv_heads": 2}),
    ("inline", {"kv_heads": 2}),
    ("mala", {"kv_heads": 1}),
    ("retention", {"kv_heads": 2}),
    *((name, {"kv_heads": 2, "model_dim": 7}) for name in ("gla", "ssd", "delta", "gated-delta", "kda")),
    ("hybrid", {"window": 3, "sinks": 1, "kv_heads": 2, "relative": False, "gain": "query"}),
    ("hybrid", {"window": 1, "sinks": 0, "gain": "none", "scale": 0.7}),
    *(("hybrid", {**SMALL_HYBRID, "feature_map": cls.name}) for cls in FEATURE_MAPS if cls.positive),
    ("hybrid", {**SMALL_HYBRID, "feature_map": "polynomial", "map_options": {"degree": 2}}),
    ("hybrid", {**SMALL_HYBRID, "feature_map": "taylor", "relative": False}),
    ("hybrid", {"window": 5, "sinks": 1, "held": 3, "turn": 2, "kv_heads": 2}),
    ("hybrid", {"window": 9, "sinks": 0, "held": 2, "turn": 8, "kv_heads": 2, "feature_map": "prototype"}),
    ("hybrid", {"window": 2, "sinks": 2, "held": 1, "turn": 1, "relative": False, "gain": "none"}),
]


def label(case: tuple[str, dict[str, Any]]) -> str:
    name, options = case
    return "-".join([name, *(f"{key}={value}" for key, value in options.items())])


def build(case: tuple[str, dict[str, Any]]) -> Mechanism:
    name, options = case
    return mechanism(name, 4, 4, 3, **options)
