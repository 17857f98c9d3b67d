"""The delta rule."""

from attngap.mechanisms.delta_rule import DeltaRule


class Delta(DeltaRule):
    """S_i = (I - beta_i k_i k_i^T) S_{i-1} + beta_i k_i v_i^T, |k_i| = 1, beta_i = sigmoid(x_i w) (2406.06484).

    Writes replace what was stored under a key instead of adding to it.
    """

    name, paper = "delta", "2406.06484"
