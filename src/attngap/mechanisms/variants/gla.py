"""Gated linear attention."""

from attngap.mechanisms.gated_linear import GatedLinear
from attngap.mechanisms.gates import Gate, LogSigmoidGate


class Gla(GatedLinear):
    """S_i = diag(alpha_i) S_{i-1} + k_i v_i^T, alpha_i = sigmoid(x_i A B + c)^(1/16), one a channel (2312.06635)."""

    name, paper = "gla", "2312.06635"

    def decay_gate(self) -> Gate:
        return LogSigmoidGate(self.name, self.model_dim, self.kv_heads, self.dim)
