"""A short causal convolution with SiLU: its torch form and its compiled form."""

from attngap.ops.convolution.short import short_convolution

__all__ = ["short_convolution"]
