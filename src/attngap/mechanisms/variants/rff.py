"""Random Fourier features."""

from attngap.mechanisms import feature_maps
from attngap.mechanisms.feature_attention import FeatureAttention


class Rff(FeatureAttention):
    """w_ij ~ an estimate of exp(sigma^2 q_i . k_j) for unit q and k, by sines and cosines (RFA, arXiv 2103.02143).

    `features` random directions (dim by default) give twice as many features, drawn from `seed`.
    """

    name, paper = "rff", "2103.02143"
    map = feature_maps.Rff

    def __init__(
        self,
        heads: int,
        dim: int,
        value_dim: int | None = None,
        *,
        features: int | None = None,
        sigma: float = 1.0,
        seed: int = 0,
        kv_heads: int | None = None,
        causal: bool = True,
    ):
        super().__init__(
            heads, dim, value_dim, kv_heads=kv_heads, causal=causal, features=features, sigma=sigma, seed=seed
        )
