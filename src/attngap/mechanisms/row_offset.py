"""Linear attentions whose rows carry an offset: sums to one by subtraction instead of division."""

import torch
from jaxtyping import Float
from torch import Tensor

from attngap.mechanisms.base import State, Streams, read_out
from attngap.mechanisms.feature_attention import FeatureAttention
from attngap.ops.linear import linear_attention
from attngap.ops.pairs import expand_heads, pair_mask


class RowOffset(FeatureAttention):
    """w_ij = gain_i a_ij + offset_i with a_ij = q_i . k_j / (sqrt(d) n_i), n_i the number of keys row i reads.

    gain and offset depend on the row's mean score z_i = sum_j a_ij only (`coefficients`). Both papers of this family
    are bidirectional, with n_i = n; the causal form is our adaptation: row i is the paper's row over the keys so far.
    It stays recurrent because k extended by a constant 1 carries n_i and sum_j k_j in z, and sum_j v_j in S:
    w_ij = [gain_i q_i / (sqrt(d) n_i), offset_i] . [k_j, 1], so rank W[t:, :t+1] <= r + 1.
    """

    def __init__(
        self, heads: int, dim: int, value_dim: int | None = None, *, kv_heads: int | None = None, causal: bool = True
    ):
        super().__init__(heads, dim, value_dim, kv_heads=kv_heads, causal=causal)
        self.width = self.feature_map.width + 1

    @property
    def rank(self) -> int:
        return self.feature_map.rank + 1

    def coefficients(self, mean: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """(gain, offset) of rows whose scores sum to `mean`, over `count` keys."""
        raise NotImplementedError

    def encode(self, x, q, k, v, position, mask) -> Streams:
        streams = super().encode(x, q, k, v, position, mask)
        one = torch.ones_like(streams.k[..., :1])
        return streams.replace(q=streams.q * self.dim**-0.5, k=torch.cat([streams.k, one], -1))

    def step(self, state: State, streams: Streams) -> tuple[Float[Tensor, "b h 1 dv"], State]:
        self.require_causal("step")
        now = streams.wide()
        real = streams.real[:, None, :, None]
        k = now.k * real
        new = {"S": state["S"] + k.mT * now.v, "z": state["z"] + k[:, :, 0]}
        q = self._rows(now.q, new["z"][:, :, None])
        return (read_out(q, new["S"]) * real).to(streams.v.dtype), new

    def weights(self, streams: Streams) -> Float[Tensor, "b h t t"]:
        streams = streams.wide()
        allowed = pair_mask(streams.length, streams.mask, causal=self.causal, window=None, sinks=0)[:, None]
        allowed = allowed.to(streams.q.device)
        count = allowed.sum(-1, keepdim=True).clamp(min=1).to(streams.q.dtype)
        scores = streams.q @ expand_heads(streams.k[..., :-1], self.heads).mT / count
        scores = torch.where(allowed, scores, 0.0)
        gain, offset = self.coefficients(scores.sum(-1, keepdim=True), count)
        return torch.where(allowed, gain * scores + offset, 0.0)

    def chunked(
        self, streams: Streams, state: State | None = None, chunk: int | None = None
    ) -> tuple[Float[Tensor, "b h t dv"], State]:
        if state is not None:
            self.require_causal("a carried state")
        now = streams.wide()
        sums = (now.k * streams.real[:, None, :, None]).cumsum(2)  # (b, h_kv, t, r + 1)
        if state is not None:
            sums = sums + state["z"][:, :, None]
        if not self.causal:
            sums = sums[:, :, -1:].expand_as(sums)
        q = self._rows(now.q, sums)
        out, after = linear_attention(
            q.to(streams.q.dtype),
            streams.k,
            streams.v,
            normalize=False,
            causal=self.causal,
            state=None if state is None else {"S": state["S"]},
            chunk=chunk,
            mask=streams.mask,
        )
        return out, {"S": after["S"], "z": sums[:, :, -1]}

    def _rows(self, q: Float[Tensor, "b h t r"], sums: Float[Tensor, "b h_kv t r1"]) -> Float[Tensor, "b h t r1"]:
        """Queries that read weights off [k_j, 1], given the running sums of those keys."""
        sums = expand_heads(sums, self.heads)
        count = sums[..., -1:].clamp(min=1)  # zero only before the first real token
        mean = (q * sums[..., :-1]).sum(-1, keepdim=True) / count
        gain, offset = self.coefficients(mean, count)
        return torch.cat([gain * q / count, offset], -1)
