"""The delta rule: its definition, its torch form (chunks) and its compiled form."""

from attngap.ops.delta.attention import delta_attention

__all__ = ["delta_attention"]
