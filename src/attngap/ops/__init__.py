"""Tensors in, tensors out: the performance-critical code. `naive` holds the definitions."""
