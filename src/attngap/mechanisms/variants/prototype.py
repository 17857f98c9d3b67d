"""Learned features that start from the queries a head sees."""

from attngap.mechanisms import feature_maps
from attngap.mechanisms.feature_attention import FeatureAttention


class Prototype(FeatureAttention):
    """w_ij ~ sum_r m_r(q_i) exp(p_r . k_j): softmax attention of r prototype queries, mixed by each query.

    Ours; in the family of learned positive features (arXiv 2402.04347), with exponentials instead of Hedgehog's softmax
    over features on the key side, so that a key's size is not lost. `features` is the number of prototypes, 2 dim by
    default.
    """

    name, paper, learned = "prototype", "2402.04347", True
    map = feature_maps.Prototype

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
