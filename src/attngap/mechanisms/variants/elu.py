"""The first linear transformer."""

from attngap.mechanisms import feature_maps
from attngap.mechanisms.feature_attention import FeatureAttention


class Elu(FeatureAttention):
    """w_ij ~ phi(q_i) . phi(k_j) with phi(x) = elu(x) + 1 (arXiv 2006.16236)."""

    name, paper = "elu", "2006.16236"
    map = feature_maps.Elu
