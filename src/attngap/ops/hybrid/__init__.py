"""Hybrid attention: its definition, its torch form (blocks of rows) and its compiled form."""

from attngap.ops.hybrid.attention import far_form, hybrid_attention, near_attention, window_attention
from attngap.ops.hybrid.blocks import Near
from attngap.ops.hybrid.decode import KeptHeads, decode_step
from attngap.ops.hybrid.state import empty_state

__all__ = [
    "KeptHeads",
    "Near",
    "decode_step",
    "empty_state",
    "far_form",
    "hybrid_attention",
    "near_attention",
    "window_attention",
]
