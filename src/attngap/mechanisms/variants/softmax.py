"""Softmax attention: the mechanism every other one is measured against."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from attngap.mechanisms.base import Mechanism, State, Streams
from attngap.ops.pairs import expand_heads
from attngap.ops.softmax import softmax_attention
from attngap.ops.softmax.definition import softmax_weights


class Softmax(Mechanism):
    """w_ij = exp(s q_i . k_j) / sum_l exp(s q_i . k_l), s = `scale` or 1/sqrt(d) (arXiv 1706.03762).

    The state is the cache of keys and values: it grows with the sequence, and its rank with it.
    """

    name, paper, normalized = "softmax", "1706.03762", True

    def __init__(
        self,
        heads: int,
        dim: int,
        value_dim: int | None = None,
        *,
        scale: float | None = None,
        kv_heads: int | None = None,
        causal: bool = True,
    ):
        super().__init__(heads, dim, value_dim, kv_heads=kv_heads, causal=causal)
        self.scale = dim**-0.5 if scale is None else scale

    def encode(self, x, q, k, v, position, mask) -> Streams:
        return Streams(q, k, v, mask=mask)

    def init_state(self, streams: Streams) -> State:
        self.require_causal("init_state")
        return {"k": streams.k[:, :, :0], "v": streams.v[:, :, :0], "real": streams.real[:, :0]}

    def step(self, state: State, streams: Streams) -> tuple[Float[Tensor, "b h 1 dv"], State]:
        self.require_causal("step")
        new = _append(state, streams)
        q = streams.wide().q
        k, v = (expand_heads(new[name], self.heads).to(q.dtype) for name in ("k", "v"))
        logits = (q @ k.mT * self.scale).masked_fill(~new["real"][:, None, None], -torch.inf)
        rows = torch.where(streams.real[:, None, :, None], logits, 0.0).softmax(-1)
        return (rows @ v * streams.real[:, None, :, None]).to(streams.v.dtype), new

    def weights(self, streams: Streams) -> Float[Tensor, "b h t t"]:
        streams = streams.wide()
        return softmax_weights(streams.q, streams.k, scale=self.scale, causal=self.causal, mask=streams.mask)

    def chunked(
        self, streams: Streams, state: State | None = None, chunk: int | None = None
    ) -> tuple[Float[Tensor, "b h t dv"], State]:
        """`chunk` changes nothing here: the op chooses its own blocks."""
        if state is None:
            out = softmax_attention(
                streams.q, streams.k, streams.v, scale=self.scale, causal=self.causal, mask=streams.mask
            )
            return out, {"k": streams.k, "v": streams.v, "real": streams.real}
        self.require_causal("a carried state")
        new = _append(state, streams)
        before, t = state["k"].shape[2], streams.length
        seen = torch.ones(t, before + t, dtype=torch.bool, device=streams.q.device).tril(before)
        # Rows of padding read everything, so that none is empty, and are zeroed afterwards.
        allowed = seen & new["real"][:, None, None] | ~streams.real[:, None, :, None]
        q = streams.wide().q
        k, v = new["k"].to(q.dtype), new["v"].to(q.dtype)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=self.scale, enable_gqa=True)
        return (out * streams.real[:, None, :, None]).to(streams.v.dtype), new

    def state_floats(self, t: int) -> int:
        return t * (self.dim + self.value_dim)

    def state_rank(self, t: int) -> int:
        return t + 1


def _append(state: State, streams: Streams) -> State:
    return {
        "k": torch.cat([state["k"], streams.k], 2),
        "v": torch.cat([state["v"], streams.v], 2),
        "real": torch.cat([state["real"], streams.real], 1),
    }
