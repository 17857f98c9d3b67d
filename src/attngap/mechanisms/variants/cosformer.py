"""Rectified features, re-weighted by distance."""

from attngap.mechanisms import feature_maps
from attngap.mechanisms.feature_attention import FeatureAttention


class Cosformer(FeatureAttention):
    """w_ij ~ relu(q_i) . relu(k_j) cos(pi/2 (i - j) / length) (arXiv 2202.08791); rank 2 dim.

    The paper sets `length` to the longest sequence.
    """

    name, paper = "cosformer", "2202.08791"
    map = feature_maps.Cosformer

    def __init__(
        self,
        heads: int,
        dim: int,
        value_dim: int | None = None,
        *,
        length: int = 65536,
        kv_heads: int | None = None,
        causal: bool = True,
    ):
        super().__init__(heads, dim, value_dim, kv_heads=kv_heads, causal=causal, length=length)
