"""Learned features that imitate softmax."""

from attngap.mechanisms import feature_maps
from attngap.mechanisms.feature_attention import FeatureAttention


class Hedgehog(FeatureAttention):
    """w_ij ~ phi(q_i) . psi(k_j), phi(x) = [softmax(x W), softmax(-x W)], psi likewise (arXiv 2402.04347).

    `features` is the width of one half, dim by default.
    """

    name, paper, learned = "hedgehog", "2402.04347", True
    map = feature_maps.Hedgehog

    def __init__(
        self,
        heads: int,
        dim: int,
        value_dim: int | None = None,
        *,
        features: int | None = None,
        kv_heads: int | None = None,
        causal: bool = True,
    ):
        super().__init__(heads, dim, value_dim, kv_heads=kv_heads, causal=causal, features=features)
