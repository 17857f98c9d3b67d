"""The family that corrects its memory: the delta rule, plain, gated by a number or by a vector."""

import torch
from jaxtyping import Float
from torch import Tensor

from attngap.errors import AttngapError
from attngap.mechanisms.base import Mechanism, State, Streams, read_out
from attngap.mechanisms.gates import Gate, WriteGate
from attngap.mechanisms.linear_state import decay_factor, decayed_scores
from attngap.ops.check import accumulate_dtype
from attngap.ops.delta import delta_attention
from attngap.ops.l2norm import l2_rescale
from attngap.ops.pairs import expand_heads


class DeltaRule(Mechanism):
    """S_i = D_i S_{i-1} + beta_i k_i (v_i - k_i^T D_i S_{i-1})^T, o_i = q_i^T S_i / sqrt(d), D_i = diag(exp g_i).

    Queries and keys are scaled to unit length, as in the papers: with beta in (0, 1) the transition then never expands.
    A variant names its decay gate in `decay_gate`, or has none. Causal only: a write depends on those before it.
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
        self.model_dim = heads * dim if model_dim is None else model_dim
        self.write = WriteGate(self.name, self.model_dim, self.kv_heads)
        self.decay = self.decay_gate()

    def decay_gate(self) -> Gate | None:
        """The gate g that forgets before each write; None keeps everything."""
        return None

    def encode(self, x, q, k, v, position, mask) -> Streams:
        return Streams(
            l2_rescale(q, self.dim**-0.5),
            l2_rescale(k, 1.0),
            v,
            log_decay=None if self.decay is None else self.decay(x),
            beta=self.write(x),
            mask=mask,
        )

    def init_state(self, streams: Streams) -> State:
        b, h, _, r = streams.k.shape
        dtype = accumulate_dtype(streams.v.dtype)
        return {"S": torch.zeros(b, h, r, streams.v.shape[-1], dtype=dtype, device=streams.v.device)}

    def step(self, state: State, streams: Streams) -> tuple[Float[Tensor, "b h 1 dv"], State]:
        now = streams.wide()
        real = streams.real[:, None, :, None]  # (b, 1, 1, 1)
        kept = decay_factor(now, real) * state["S"]
        write = real * _beta(self.name, now)[..., None] * (now.v - now.k @ kept)  # (b, h_kv, 1, dv)
        S = kept + now.k.mT * write
        return (read_out(now.q, S) * real).to(streams.v.dtype), {"S": S}

    def weights(self, streams: Streams) -> Float[Tensor, "b h t t"]:
        """W = tril(Q K) (I + diag(beta) tril(K K, -1))^-1 diag(beta), products decayed between their tokens."""
        streams = streams.wide()
        k, beta = expand_heads(streams.k, self.heads), expand_heads(_beta(self.name, streams), self.heads)
        decay = None if streams.log_decay is None else expand_heads(streams.log_decay, self.heads)
        real = streams.real[:, None, :, None].to(k.dtype)
        beta = beta[..., None] * real  # (b, h, t, 1)
        reads = decayed_scores(streams.q, k, decay, streams.mask).tril() * real
        recalls = decayed_scores(k, k, decay, streams.mask).tril(-1)
        eye = torch.eye(streams.length, dtype=k.dtype, device=k.device)
        # solve, not invert: unit-triangular, so exact; W L = reads, with L = I + beta * recalls
        mixed = torch.linalg.solve_triangular(eye + beta * recalls, reads, upper=False, left=False, unitriangular=True)
        return mixed * beta.mT

    def chunked(
        self, streams: Streams, state: State | None = None, chunk: int | None = None
    ) -> tuple[Float[Tensor, "b h t dv"], State]:
        out, after = delta_attention(
            streams.q,
            streams.k,
            streams.v,
            _beta(self.name, streams),
            log_decay=streams.log_decay,
            state=state,
            chunk=chunk,
            mask=streams.mask,
        )
        return out, after

    def state_floats(self, t: int) -> int:
        return self.dim * self.value_dim

    def state_rank(self, t: int) -> int:
        return min(self.dim, t + 1)


def _beta(name: str, streams: Streams) -> Float[Tensor, "b h_kv t"]:
    if streams.beta is None:
        raise AttngapError(f"{name}: these streams have no beta; make them with this mechanism's `read`")
    return streams.beta
