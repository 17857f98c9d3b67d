"""Performer's random features."""

from attngap.mechanisms import feature_maps
from attngap.mechanisms.feature_attention import FeatureAttention


class Favor(FeatureAttention):
    """w_ij ~ phi(q_i) . phi(k_j), an unbiased positive estimate of exp(q_i . k_j / sqrt(d)) (FAVOR+, 2009.14794).

    `features` random directions (d log d by default, as in the paper), drawn from `seed` and saved with the weights.
    """

    name, paper = "favor", "2009.14794"
    map = feature_maps.Favor

    def __init__(
        self,
        heads: int,
        dim: int,
        value_dim: int | None = None,
        *,
        features: int | None = None,
        seed: int = 0,
        kv_heads: int | None = None,
        causal: bool = True,
    ):
        super().__init__(heads, dim, value_dim, kv_heads=kv_heads, causal=causal, features=features, seed=seed)
