"""The family of kernelized attentions: a feature map, a running sum, a normalizer."""

from typing import Any, ClassVar

from attngap.mechanisms.base import Streams
from attngap.mechanisms.feature_maps import FeatureMap
from attngap.mechanisms.linear_state import LinearState
from attngap.ops.check import check_finite
from attngap.ops.normalizer import safe_normalizer
from attngap.ops.pairs import expand_heads


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

    def mix(self, x, q, k, v, *, mask=None):
        """By the scores, where the map is a function of them and a row has fewer of them than of features."""
        if not self.feature_map.of_scores or q.shape[2] > self.width:
            return super().mix(x, q, k, v, mask=mask)
        self.validate(x, q, k, v, mask)
        now = Streams(q, k, v, mask=mask).wide()
        scores = now.q @ expand_heads(now.k, self.heads).mT * self.dim**-0.5
        raw = self.seen(self.feature_map.kernel(scores), mask)  # (b, h, t, t)
        out = raw @ expand_heads(now.v, self.heads) / safe_normalizer(raw.sum(-1, keepdim=True))
        check_finite({"out": out}, {"q": q, "k": k, "v": v})
        return out.to(v.dtype)
