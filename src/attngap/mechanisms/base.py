"""The one abstraction: a mixer linear in v, with its recurrent, parallel and chunked forms."""

import dataclasses
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from attngap.errors import AttngapError
from attngap.mechanisms.rotary import Angles
from attngap.ops.check import accumulate_dtype
from attngap.ops.pairs import expand_heads

State = dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class Streams:
    """What a mechanism reads, token by token: features, values, gates. Time is always axis 2 (axis 1 for the mask)."""

    q: Tensor  # (b, h, t, r) features of the query, or the query itself for softmax
    k: Tensor  # (b, h_kv, t, r)
    v: Tensor  # (b, h_kv, t, dv)
    log_decay: Tensor | None = None  # (b, h_kv, t) or (b, h_kv, t, r)
    beta: Tensor | None = None  # (b, h_kv, t)
    log_gain: Tensor | None = None  # (b, h, t)
    fq: Tensor | None = None  # (b, h, t, r) far features, where q and k stay exact (hybrid)
    fk: Tensor | None = None  # (b, h_kv, t, r)
    mask: Tensor | None = None  # (b, t) True at real tokens

    @property
    def length(self) -> int:
        return self.q.shape[2]

    @property
    def real(self) -> Bool[Tensor, "b t"]:
        """The mask, all True where none was given."""
        if self.mask is not None:
            return self.mask
        return torch.ones(self.q.shape[0], self.length, dtype=torch.bool, device=self.q.device)

    def replace(self, **changes: Tensor | None) -> "Streams":
        return dataclasses.replace(self, **changes)

    def wide(self) -> "Streams":
        """In float32 where they are in half precision: what sums and n x n matrices are computed in."""
        dtype = accumulate_dtype(self.v.dtype)
        tensors = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "mask"}
        return self.replace(**{name: x.to(dtype) for name, x in tensors.items() if x is not None})

    def slice(self, start: int, stop: int) -> "Streams":
        """The tokens start:stop, as views."""
        cut = {}
        for field in dataclasses.fields(self):
            x = getattr(self, field.name)
            if x is not None:
                cut[field.name] = x[:, start:stop] if field.name == "mask" else x[:, :, start:stop]
        return Streams(**cut)


class Mechanism(nn.Module):
    """A mixer, linear in v. `step` is the definition; `parallel` and `chunked` must equal it.

    All parameters belong to its feature map and its gates. Output norms, short convolutions and projections live with
    the model that uses it. A subclass writes `encode`, `init_state`, `step`, `weights`, `chunked`, `state_floats` and
    `state_rank`, or inherits them from a family; `attngap.mechanisms.contracts.check` tells whether they agree.

    `kv_heads` below `heads` means grouped queries: key-side parameters and states are one for each key head.
    """

    name: ClassVar[str]  # the catalogue key
    paper: ClassVar[str]  # arXiv id
    normalized: bool  # do rows of `weights` sum to one
    learned: bool = False  # has parameters
    gated: ClassVar[bool] = False  # needs x, the layer's input, to compute its gates
    model_dim: int | None = None  # the width of x, where gated

    def __init__(
        self, heads: int, dim: int, value_dim: int | None = None, *, kv_heads: int | None = None, causal: bool = True
    ):
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        value_dim = dim if value_dim is None else value_dim
        for label, size in (("heads", heads), ("dim", dim), ("value_dim", value_dim), ("kv_heads", kv_heads)):
            if not isinstance(size, int) or size < 1:
                raise AttngapError(f"{self.name}: {label} must be a whole number of at least 1, got {size!r}")
        if heads % kv_heads:
            raise AttngapError(f"{self.name}: kv_heads must divide heads, got kv_heads={kv_heads}, heads={heads}")
        self.heads, self.kv_heads, self.dim, self.value_dim = heads, kv_heads, dim, value_dim
        self.causal = causal

    def read(
        self,
        x: Float[Tensor, "..."] | None,
        q: Float[Tensor, "..."],  # shapes are checked below, with messages for every caller and not only under pytest
        k: Float[Tensor, "..."],
        v: Float[Tensor, "..."],
        *,
        start: int | Int[Tensor, " b"] = 0,
        mask: Bool[Tensor, "..."] | None = None,
        rotary: Angles | None = None,
    ) -> Streams:
        """Map features and compute gates, from q `(b, heads, t, dim)`, k and v `(b, kv_heads, t, ...)`, x `(b, t, m)`.

        `start` is how many real tokens came before, for maps that depend on the position: one number, or one for each
        sequence. `mask` is `(b, t)`, True at real tokens; padding does not count as a position. `rotary` is the cos and
        sin that q and k were turned by, for features that do not see positions (hybrid); others have no use for it.
        """
        self.validate(x, q, k, v, mask)
        return self.encode(x, q, k, v, positions(q, start, mask), mask)

    def encode(
        self,
        x: Float[Tensor, "b t m"] | None,
        q: Float[Tensor, "b h t d"],
        k: Float[Tensor, "b h_kv t d"],
        v: Float[Tensor, "b h_kv t dv"],
        position: Int[Tensor, "#b t"],
        mask: Bool[Tensor, "b t"] | None,
    ) -> Streams:
        """`read` after its checks: what a subclass writes."""
        raise NotImplementedError

    def init_state(self, streams: Streams) -> State:
        """The state before the first token, shaped for these streams."""
        raise NotImplementedError

    def step(self, state: State, streams: Streams) -> tuple[Float[Tensor, "b h 1 dv"], State]:
        """One token (streams of length 1): the definition."""
        raise NotImplementedError

    def weights(self, streams: Streams) -> Float[Tensor, "b h t t"]:
        """The mixing matrix W: what `parallel` gives for v = identity. Rows and columns of padding are zero.

        Half precision gives float32.
        """
        raise NotImplementedError

    def parallel(self, streams: Streams) -> Float[Tensor, "b h t dv"]:
        """The n x n form, W v: for checking."""
        mixed = self.weights(streams) @ expand_heads(streams.wide().v, self.heads)
        return mixed.to(streams.v.dtype)

    def chunked(
        self, streams: Streams, state: State | None = None, chunk: int | None = None
    ) -> tuple[Float[Tensor, "b h t dv"], State]:
        """The fast form: prefill and training. `chunk` None lets the op choose."""
        raise NotImplementedError

    def advance(self, streams: Streams, state: State) -> tuple[Float[Tensor, "b h t dv"], State]:
        """`chunked` from a state that nobody else needs: without gradients it may be overwritten, as in decoding."""
        return self.chunked(streams, state)

    def state_floats(self, t: int) -> int:
        """Floats in the state, for each key head, after t tokens."""
        raise NotImplementedError

    def state_rank(self, t: int) -> int:
        """A bound on the rank of W[t:, :t+1]."""
        raise NotImplementedError

    def forward(
        self,
        x: Float[Tensor, "..."] | None,
        q: Float[Tensor, "..."],
        k: Float[Tensor, "..."],
        v: Float[Tensor, "..."],
        *,
        state: State | None = None,
        start: int | Int[Tensor, " b"] = 0,
        mask: Bool[Tensor, "..."] | None = None,
        chunk: int | None = None,
        rotary: Angles | None = None,
    ) -> tuple[Float[Tensor, "b h t dv"], State]:
        """`read`, then `chunked`."""
        return self.chunked(self.read(x, q, k, v, start=start, mask=mask, rotary=rotary), state, chunk)

    def mix(
        self,
        x: Float[Tensor, "..."] | None,
        q: Float[Tensor, "..."],
        k: Float[Tensor, "..."],
        v: Float[Tensor, "..."],
        *,
        mask: Bool[Tensor, "..."] | None = None,
    ) -> Float[Tensor, "b h t dv"]:
        """The output of `forward` for whole sequences, for training: a family may reach it faster without a state."""
        return self(x, q, k, v, mask=mask)[0]

    def extra_repr(self) -> str:
        grouped = f", kv_heads={self.kv_heads}" if self.kv_heads != self.heads else ""
        return f"heads={self.heads}, dim={self.dim}, value_dim={self.value_dim}{grouped}"

    def require_causal(self, form: str) -> None:
        """Refuse a recurrent form of a bidirectional mechanism: its rows need tokens that have not come yet."""
        if not self.causal:
            raise AttngapError(f"{self.name}: {form} needs causal=True; with causal=False use parallel or chunked")

    def validate(self, x: Tensor | None, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> None:
        """Refuse inputs whose shapes or types do not go together."""
        if q.ndim != 4:
            raise AttngapError(f"{self.name}: q must have 4 axes (b, heads, t, dim), got shape {tuple(q.shape)}")
        b, _, t, _ = q.shape
        expected: list[tuple[str, Tensor, tuple[int, ...]]] = [
            ("q", q, (b, self.heads, t, self.dim)),
            ("k", k, (b, self.kv_heads, t, self.dim)),
            ("v", v, (b, self.kv_heads, t, self.value_dim)),
        ]
        if mask is not None:
            expected.append(("mask", mask, (b, t)))
        for label, given, shape in expected:
            if tuple(given.shape) != shape:
                raise AttngapError(f"{self.name}: {label} must have shape {shape}, got {tuple(given.shape)}")
        if t == 0:
            raise AttngapError(f"{self.name}: q must hold at least one token, got length 0")
        if mask is not None and mask.dtype != torch.bool:
            raise AttngapError(f"{self.name}: mask must be bool (True at real tokens), got {mask.dtype}")
        if self.gated and x is None:
            raise AttngapError(f"{self.name}: its gates are computed from x, the layer's input (b, t, m); got None")
        others = [("k", k), ("v", v)] + ([("x", x)] if self.gated and x is not None else [])
        for label, given in others:
            if (given.dtype, given.device) != (q.dtype, q.device):
                raise AttngapError(
                    f"{self.name}: {label} must match q ({q.dtype} on {q.device}), got {given.dtype} on {given.device}"
                )


def positions(q: Tensor, start: int | Tensor, mask: Tensor | None) -> Int[Tensor, "#b t"]:
    """How many real tokens came before each; padding does not count."""
    first = torch.as_tensor(start, device=q.device).reshape(-1, 1)  # (1 or b, 1)
    if mask is None:
        return first + torch.arange(q.shape[2], device=q.device)
    return first + (mask.long().cumsum(1) - 1).clamp(min=0)


def read_out(q: Float[Tensor, "b h t r"], S: Float[Tensor, "b h_kv r dv"]) -> Float[Tensor, "b h t dv"]:
    """q S, each group of query heads reading the state of its key head."""
    grouped = q.unflatten(1, (S.shape[1], -1))  # (b, h_kv, group, t, r)
    return (grouped @ S[:, :, None]).flatten(1, 2)
