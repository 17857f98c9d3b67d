"""Rows divided by their root mean square, compiled for the few rows of a token."""

from attngap.ops.rms.compiled import RmsWeight

__all__ = ["RmsWeight"]
