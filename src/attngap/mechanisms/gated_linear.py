"""The family that forgets: linear attention whose decay is computed from the layer's input."""

from attngap.mechanisms.base import Streams
from attngap.mechanisms.gates import Gate
from attngap.mechanisms.linear_state import LinearState


class GatedLinear(LinearState):
    """S_i = diag(exp g_i) S_{i-1} + k_i v_i^T, o_i = q_i S_i / sqrt(d), g_i <= 0 from x_i; not normalized.

    Causal only: a decay runs along the sequence.
    """

    normalized = False
    learned = True
    gated = True
    model_dim: int

    def __init__(
        self,
        heads: int,
        dim: int,
        value_dim: int | None = None,
        *,
        model_dim: int | None = None,
        kv_heads: int | None = None,
    ):
        super().__init__(heads, dim, value_dim, kv_heads=kv_heads)
        self.width = dim
        self.model_dim = heads * dim if model_dim is None else model_dim
        self.decay = self.decay_gate()

    def decay_gate(self) -> Gate:
        raise NotImplementedError

    def encode(self, x, q, k, v, position, mask) -> Streams:
        return Streams(q * self.dim**-0.5, k, v, log_decay=self.decay(x), mask=mask)
