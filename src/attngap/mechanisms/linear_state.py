"""The family with a matrix for a memory: every kernelized, decayed and gated linear attention."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attngap.mechanisms.base import Mechanism, State, Streams, read_out
from attngap.ops.check import accumulate_dtype
from attngap.ops.linear import linear_attention
from attngap.ops.normalizer import safe_normalizer
from attngap.ops.pairs import expand_heads, pair_mask


class LinearState(Mechanism):
    """S_i = D_i S_{i-1} + k_i v_i^T with D_i = diag(exp log_decay_i), z_i likewise over k_i.

    o_i = q_i S_i / (q_i . z_i) if normalized, else q_i S_i. A subclass sets `width`, the number of features r, and
    writes `encode`. The state is r x dv (and z, of r, if normalized); rank W[t:, :t+1] <= r because the block factors
    through S_t.
    """

    width: int

    @property
    def rank(self) -> int:
        """What `state_rank` reaches: the width, unless the features obey a linear relation."""
        return self.width

    def init_state(self, streams: Streams) -> State:
        self.require_causal("init_state")
        b, h, _, r = streams.k.shape
        like = {"dtype": accumulate_dtype(streams.v.dtype), "device": streams.v.device}
        state = {"S": torch.zeros(b, h, r, streams.v.shape[-1], **like)}
        if self.normalized:
            state["z"] = torch.zeros(b, h, r, **like)
        return state

    def step(self, state: State, streams: Streams) -> tuple[Float[Tensor, "b h 1 dv"], State]:
        self.require_causal("step")
        now = streams.wide()
        real = streams.real[:, None, :, None]  # (b, 1, 1, 1)
        k = now.k * real
        keep = decay_factor(now, real)  # (b, h_kv, 1 or r, 1)
        new = {"S": keep * state["S"] + k.mT * now.v}
        out = read_out(now.q, new["S"])
        if self.normalized:
            new["z"] = keep[..., 0] * state["z"] + k[:, :, 0]
            out = out / safe_normalizer(read_out(now.q, new["z"][..., None]))
        return (out * real).to(streams.v.dtype), new

    def weights(self, streams: Streams) -> Float[Tensor, "b h t t"]:
        streams = streams.wide()
        q, k = streams.q, expand_heads(streams.k, self.heads)
        decay = None if streams.log_decay is None else expand_heads(streams.log_decay, self.heads)
        raw = self.seen(decayed_scores(q, k, decay, streams.mask), streams.mask)
        return raw / safe_normalizer(raw.sum(-1, keepdim=True)) if self.normalized else raw

    def seen(self, raw: Float[Tensor, "b h t t"], mask: Bool[Tensor, "b t"] | None) -> Float[Tensor, "b h t t"]:
        """Weights with zeros where a row may not read."""
        if mask is None:
            return raw.tril() if self.causal else raw
        allowed = pair_mask(raw.shape[-1], mask, causal=self.causal, window=None, sinks=0)[:, None]
        return torch.where(allowed.to(raw.device), raw, 0.0)

    def chunked(
        self, streams: Streams, state: State | None = None, chunk: int | None = None
    ) -> tuple[Float[Tensor, "b h t dv"], State]:
        if state is not None:
            self.require_causal("a carried state")
        out, after = linear_attention(
            streams.q,
            streams.k,
            streams.v,
            log_decay=streams.log_decay,
            normalize=self.normalized,
            causal=self.causal,
            state=state,
            chunk=chunk,
            mask=streams.mask,
        )
        return out, after

    def state_floats(self, t: int) -> int:
        return self.width * (self.value_dim + self.normalized)

    def state_rank(self, t: int) -> int:
        return min(self.rank, t + 1)


def decay_factor(streams: Streams, real: Bool[Tensor, "b 1 1 1"]) -> Tensor:
    """exp(log_decay) of one token as a factor of S, (b, h_kv, 1 or r, 1); 1 at padding: the state stays as it is."""
    if streams.log_decay is None:
        return streams.q.new_ones(1, 1, 1, 1)
    log_decay = streams.log_decay[..., None] if streams.log_decay.ndim == 3 else streams.log_decay
    return torch.where(real, log_decay, 0.0).exp().mT


def decayed_scores(
    q: Float[Tensor, "b h t r"], k: Float[Tensor, "b h t r"], log_decay: Tensor | None, mask: Tensor | None
) -> Float[Tensor, "b h t t"]:
    """sum_c q_ic k_jc exp(G_ic - G_jc), G the running sum of log_decay. Exact for j <= i however strong the decay.

    A vector decay costs one t x t pass a channel: splitting exp(G_i) exp(-G_j) would overflow.
    """
    if log_decay is None:
        return q @ k.mT
    steps = log_decay if log_decay.ndim == 4 else log_decay[..., None]
    if mask is not None:
        steps = torch.where(mask[:, None, :, None], steps, 0.0)
    total = steps.cumsum(2)  # (b, h, t, 1 or r)
    if total.shape[-1] == 1:
        return q @ k.mT * _pairwise_decay(total[..., 0])
    scores = torch.zeros_like(q @ k.mT)
    for c in range(q.shape[-1]):
        scores = scores + q[..., c, None] * k[..., None, :, c] * _pairwise_decay(total[..., c])
    return scores


def _pairwise_decay(total: Float[Tensor, "b h t"]) -> Float[Tensor, "b h t t"]:
    """exp(G_i - G_j), capped at 1: above the diagonal the difference is positive, and those entries are not used."""
    return (total[..., :, None] - total[..., None, :]).clamp(max=0.0).exp()
