"""The delta rule with a scalar gate."""

from attngap.mechanisms.delta_rule import DeltaRule
from attngap.mechanisms.gates import Gate, StepSizeGate


class GatedDelta(DeltaRule):
    """S_i = alpha_i (I - beta_i k_i k_i^T) S_{i-1} + beta_i k_i v_i^T, |k_i| = 1 (Gated DeltaNet, arXiv 2412.06464).

    alpha_i = exp(-A softplus(x_i w + c)), A > 0, and beta_i = sigmoid(x_i u).
    """

    name, paper = "gated-delta", "2412.06464"

    def decay_gate(self) -> Gate:
        return StepSizeGate(self.name, self.model_dim, self.kv_heads)
