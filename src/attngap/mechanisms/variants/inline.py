"""Injective linear attention."""

import torch

from attngap.mechanisms import feature_maps
from attngap.mechanisms.row_offset import RowOffset


class Inline(RowOffset):
    """w_ij = a_ij - mean_l a_il + 1/n, a_ij = q_i . k_j / (sqrt(d) n): different queries, different rows (2412.06590).

    The paper's form is bidirectional, over n tokens, and its released code has this scale and phi(x) = x; the causal
    row i, with n = i, is our adaptation (`RowOffset`).
    """

    name, paper = "inline", "2412.06590"
    map = feature_maps.Identity

    def coefficients(self, mean, count):
        return torch.ones_like(mean), (1 - mean) / count
