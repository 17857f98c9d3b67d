"""Rows brought to a given length: the torch form and the compiled form."""

from attngap.ops.l2norm.rows import l2_rescale

__all__ = ["l2_rescale"]
