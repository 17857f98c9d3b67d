"""Softmax attention: its definition, and torch's fused kernel or blocks of rows."""

from attngap.ops.softmax.attention import softmax_attention

__all__ = ["softmax_attention"]
