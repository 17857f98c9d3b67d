"""Mamba-2's state-space dual."""

from attngap.mechanisms.base import Streams
from attngap.mechanisms.gated_linear import GatedLinear
from attngap.mechanisms.gates import StepSizeGate


class Ssd(GatedLinear):
    """S_i = exp(-A dt_i) S_{i-1} + dt_i k_i v_i^T, o_i = q_i S_i, dt_i = softplus(x_i w + c), A > 0 (2405.21060).

    q, k, v are the paper's C, B, X; its skip D and its convolution belong to the model around it.
    """

    name, paper = "ssd", "2405.21060"
    decay: StepSizeGate

    def decay_gate(self) -> StepSizeGate:
        return StepSizeGate(self.name, self.model_dim, self.kv_heads)

    def encode(self, x, q, k, v, position, mask) -> Streams:
        log_decay = self.decay(x)
        written = (k * self.decay.step_size(x)[..., None]).to(k.dtype)
        return Streams(q, written, v, log_decay=log_decay, mask=mask)
