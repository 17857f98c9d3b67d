"""Products of a few rows with a large matrix, which take as long as it takes to read the matrix once."""

from attngap.ops.thin.compiled import ThinGated, ThinWeight, thin_product

__all__ = ["ThinGated", "ThinWeight", "thin_product"]
