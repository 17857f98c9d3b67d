"""The one abstraction: a mixer linear in v, with its recurrent, parallel and chunked forms."""

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor, nn

from attngap.errors import AttngapError

State = dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class Streams:
    """What a mechanism reads, token by token: features, values, gates. Time is always axis 2 (axis 1 for the mask)."""

    q: Tensor  # (b, h, t, r) features of the query, or the query itself for softmax
    k: Tensor  # (b, h_kv, t, r)
    v: Tensor  # (b, h_kv, t, dv)
    log_decay: Tensor | None = None  # (b, h, t) or (b, h, t, r)
    beta: Tensor | None = None  # (b, h, t)
    log_gain: Tensor | None = None  # (b, h, t)
    fq: Tensor | None = None  # (b, h, t, r) far features, where q and k stay exact (hybrid)
    fk: Tensor | None = None  # (b, h_kv, t, r)
    mask: Tensor | None = None  # (b, t) True at real tokens

    @property
    def length(self) -> int:
        return self.q.shape[2]

    def replace(self, **changes: Tensor | None) -> "Streams":
        return dataclasses.replace(self, **changes)

    def slice(self, start: int, stop: int) -> "Streams":
        """The tokens start:stop, as views."""
        cut = {}
        for field in dataclasses.fields(self):
            x = getattr(self, field.name)
            if x is not None:
                cut[field.name] = x[:, start:stop] if field.name == "mask" else x[:, :, start:stop]
        return Streams(**cut)


class Mechanism(nn.Module):
    """A causal mixer, linear in v. `step` is the definition; `parallel` and `chunked` must equal it.

    All parameters belong to its feature map and its gates. Output norms, short convolutions and projections live with
    the model that uses it.
    """

    name: ClassVar[str]  # the catalogue key
    paper: ClassVar[str]  # arXiv id
    normalized: ClassVar[bool]  # do rows of `weights` sum to one
    learned: ClassVar[bool] = False  # has parameters
    gated: ClassVar[bool] = False  # needs x, the layer's input, to compute its gates

    def __init__(self, heads: int, dim: int, value_dim: int | None = None):
        super().__init__()
        for label, size in (("heads", heads), ("dim", dim), ("value_dim", value_dim or dim)):
            if size < 1:
                raise AttngapError(f"{self.name}: {label} must be at least 1, got {size}")
        self.heads, self.dim, self.value_dim = heads, dim, value_dim or dim

    def read(
        self, x: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *, start: int = 0, mask: Tensor | None = None
    ) -> Streams:
        """Map features and compute gates. `start` is the position of the first token, for maps that depend on it."""
        raise NotImplementedError

    def init_state(self, streams: Streams) -> State:
        raise NotImplementedError

    def step(self, state: State, streams: Streams) -> tuple[State, Tensor]:
        """One token (streams of length 1): the definition."""
        raise NotImplementedError

    def parallel(self, streams: Streams) -> Tensor:
        """The n x n form, for checking and for weights."""
        raise NotImplementedError

    def chunked(self, streams: Streams, state: State | None = None, chunk: int | None = None) -> tuple[State, Tensor]:
        """The fast form: prefill and training."""
        raise NotImplementedError

    def state_floats(self, t: int) -> int:
        """Floats in the state, per head, after t tokens."""
        raise NotImplementedError

    def state_rank(self, t: int) -> int:
        """A bound on the rank of W[t:, :t+1]."""
        raise NotImplementedError

    def weights(self, streams: Streams) -> Tensor:
        """(b, h, t, t): the mixing matrix, read off by feeding v = identity."""
        b, kv_heads, t, _ = streams.v.shape
        eye = torch.eye(t, dtype=streams.v.dtype, device=streams.v.device).expand(b, kv_heads, t, t)
        return self.parallel(streams.replace(v=eye))

    def forward(
        self,
        x: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        state: State | None = None,
        start: int = 0,
        mask: Tensor | None = None,
        chunk: int | None = None,
    ) -> tuple[State, Tensor]:
        return self.chunked(self.read(x, q, k, v, start=start, mask=mask), state, chunk)
