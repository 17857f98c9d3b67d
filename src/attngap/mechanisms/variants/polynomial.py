"""Polynomial kernels."""

from attngap.mechanisms import feature_maps
from attngap.mechanisms.feature_attention import FeatureAttention


class Polynomial(FeatureAttention):
    """w_ij ~ (q_i . k_j)^degree, exactly, by the distinct monomials (the kernel of PolySketchFormer, 2310.01655).

    The state grows like dim^degree / degree!; an odd degree has signed weights.
    """

    name, paper = "polynomial", "2310.01655"
    map = feature_maps.Polynomial

    def __init__(
        self,
        heads: int,
        dim: int,
        value_dim: int | None = None,
        *,
        degree: int = 2,
        kv_heads: int | None = None,
        causal: bool = True,
    ):
        super().__init__(heads, dim, value_dim, kv_heads=kv_heads, causal=causal, degree=degree)
