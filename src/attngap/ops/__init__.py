"""Tensors in, tensors out: one folder for each op, with its definition, its torch form and its compiled form."""

from attngap.ops.delta import delta_attention
from attngap.ops.hybrid import hybrid_attention
from attngap.ops.linear import linear_attention
from attngap.ops.softmax import softmax_attention

__all__ = ["delta_attention", "hybrid_attention", "linear_attention", "softmax_attention"]
