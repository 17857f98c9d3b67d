"""Linear attention: its definition, its torch forms (chunks; rows where it is not causal) and its compiled form."""

from attngap.ops.linear.attention import linear_attention

__all__ = ["linear_attention"]
