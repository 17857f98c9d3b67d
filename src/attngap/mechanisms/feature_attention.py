"""The family of kernelized attentions: a feature map, a running sum, a normalizer."""

from typing import Any, ClassVar

from attngap.mechanisms.base import Streams
from attngap.mechanisms.feature_maps import FeatureMap
from attngap.mechanisms.linear_state import LinearState


class FeatureAttention(LinearState):
    """w_ij = phi_q(q_i) . phi_k(k_j) / sum over the keys row i may read; all of it is in the map.

    A variant names its `map`; one whose map has options lists them in its own constructor and hands them on. With
    `causal=False` every row reads every key, and there is no recurrent form.
    """

    normalized = True
    map: ClassVar[type[FeatureMap]]

    def __init__(
        self,
        heads: int,
        dim: int,
        value_dim: int | None = None,
        *,
        kv_heads: int | None = None,
        causal: bool = True,
        **map_options: Any,
    ):
        super().__init__(heads, dim, value_dim, kv_heads=kv_heads, causal=causal)
        self.feature_map = self.map(heads, dim, self.kv_heads, **map_options)
        self.width = self.feature_map.width

    @property
    def rank(self) -> int:
        return self.feature_map.rank

    def encode(self, x, q, k, v, position, mask) -> Streams:
        return Streams(self.feature_map.query(q, position), self.feature_map.key(k, position), v, mask=mask)
