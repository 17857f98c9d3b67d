"""Retention: fixed decays."""

from torch import Tensor

from attngap.mechanisms.base import Streams
from attngap.mechanisms.gates import retention_decay
from attngap.mechanisms.linear_state import LinearState


class Retention(LinearState):
    """S_i = gamma_h S_{i-1} + k_i v_i^T, o_i = q_i S_i / sqrt(d), gamma_h = 1 - 2^(-5-h) (arXiv 2307.08621).

    One gamma for each key head. The paper's rotation of q and k and its group norm belong to the model around it.
    """

    name, paper, normalized = "retention", "2307.08621", False
    log_gamma: Tensor

    def __init__(self, heads: int, dim: int, value_dim: int | None = None, *, kv_heads: int | None = None):
        super().__init__(heads, dim, value_dim, kv_heads=kv_heads)
        self.width = dim
        self.register_buffer("log_gamma", retention_decay(self.kv_heads), persistent=False)

    def encode(self, x, q, k, v, position, mask) -> Streams:
        log_decay = self.log_gamma[None, :, None].expand(k.shape[:3]).to(q.dtype)
        return Streams(q * self.dim**-0.5, k, v, log_decay=log_decay, mask=mask)
