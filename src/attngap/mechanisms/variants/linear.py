"""Linear attention in its plainest form."""

from attngap.mechanisms import feature_maps
from attngap.mechanisms.feature_attention import FeatureAttention


class Linear(FeatureAttention):
    """w_ij = q_i . k_j / sum_l q_i . k_l: the scores themselves, as in the separation results (arXiv 2310.11685).

    Scores are signed, so a row's sum may vanish; `attngap.ops` states what happens then.
    """

    name, paper = "linear", "2310.11685"
    map = feature_maps.Identity
