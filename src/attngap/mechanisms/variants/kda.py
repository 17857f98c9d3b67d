"""Kimi delta attention."""

from attngap.mechanisms.delta_rule import DeltaRule
from attngap.mechanisms.gates import Gate, StepSizeGate


class Kda(DeltaRule):
    """S_i = (I - beta_i k_i k_i^T) diag(alpha_i) S_{i-1} + beta_i k_i v_i^T, alpha_i one number a channel (2510.26692).

    alpha_i = exp(-A softplus(x_i U V + c)), U V of rank dim.
    """

    name, paper = "kda", "2510.26692"

    def decay_gate(self) -> Gate:
        return StepSizeGate(self.name, self.model_dim, self.kv_heads, self.dim, rank=self.dim)
