"""Linear attention with rectified features."""

from attngap.mechanisms import feature_maps
from attngap.mechanisms.feature_attention import FeatureAttention


class Relu(FeatureAttention):
    """w_ij ~ relu(q_i) . relu(k_j) (EfficientViT, arXiv 2205.14756).

    A query without a positive entry reads nothing: its row is zero.
    """

    name, paper = "relu", "2205.14756"
    map = feature_maps.Relu
