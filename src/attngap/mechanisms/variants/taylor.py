"""The Taylor series of softmax's kernel."""

from attngap.mechanisms import feature_maps
from attngap.mechanisms.feature_attention import FeatureAttention


class Taylor(FeatureAttention):
    """w_ij ~ 1 + s + s^2 / 2 with s = q_i . k_j / sqrt(d), exp(s) to second order (Based, arXiv 2402.18668)."""

    name, paper = "taylor", "2402.18668"
    map = feature_maps.Taylor
