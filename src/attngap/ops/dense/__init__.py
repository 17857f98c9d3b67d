"""Products of many rows with a matrix by oneDNN, which on some processors takes half the time of torch's default."""

from attngap.ops.dense.product import dense_product, takes_dense

__all__ = ["dense_product", "takes_dense"]
