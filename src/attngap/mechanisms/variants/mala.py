"""Magnitude-aware linear attention."""

from attngap.mechanisms import feature_maps
from attngap.mechanisms.row_offset import RowOffset
from attngap.ops.normalizer import safe_normalizer


class Mala(RowOffset):
    """w_ij = (1 + 1/z_i) a_ij - z_i / n with z_i = sum_l a_il, a_ij = phi(q_i) . phi(k_j) / (sqrt(d) n) (2507.00698).

    phi(x) = elu(x) + 1. Division alone would ignore the size of q; here longer queries make sharper rows. The paper's
    form is bidirectional; the causal row i, with n = i, is our adaptation (`RowOffset`).
    """

    name, paper = "mala", "2507.00698"
    map = feature_maps.Elu

    def coefficients(self, mean, count):
        return 1 + 1 / safe_normalizer(mean), -mean / count
