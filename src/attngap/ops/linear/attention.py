"""Linear attention: a state instead of a cache, in time linear in the sequence."""

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from attngap.errors import AttngapError
from attngap.ops.check import (
    accumulate_dtype,
    check_attention,
    check_count,
    check_finite,
    check_log_decay,
    check_state,
)
from attngap.ops.linear.chunks import LinearChunks, Setting
from attngap.ops.linear.rows import LinearRows
from attngap.ops.pairs import expand_heads
from attngap.ops.uncompiled import uncompiled

State = dict[str, Tensor]
CHUNK = 64  # the fewest operations for widths near 64; the products of a chunk stay in the cache
BLOCK = 512  # rows at a time where no score is formed


@uncompiled
def linear_attention(
    q: Float[Tensor, "b h t r"],
    k: Float[Tensor, "b h_kv t r"],
    v: Float[Tensor, "b h_kv t dv"],
    *,
    log_decay: Float[Tensor, "b hg t"] | Float[Tensor, "b hg t r"] | None = None,
    normalize: bool = True,
    causal: bool = True,
    state: State | None = None,
    chunk: int | None = None,
    mask: Shaped[Tensor, "b t"] | None = None,
) -> tuple[Float[Tensor, "b h t dv"], State]:
    """S_i = exp(g_i) S_{i-1} + k_i v_i^T, z_i likewise over k_i; o_i = q_i S_i / (q_i . z_i), or q_i S_i unnormalized.

    Katharopoulos et al., arXiv 2006.16236; chunk by chunk as in Hua et al., arXiv 2202.10447. `log_decay` g is one
    number a token (b, heads, t) or one a channel (b, heads, t, r), at most 0, with the heads of q or of k. Without
    `causal` every row reads the state of the whole sequence. `mask` is (b, t), True at real tokens: others leave the
    state as it is and give zero rows.

    The state is {"S": (b, heads, r, dv)} and, if normalized, "z": (b, heads, r), in float32 (float64 for float64), with
    the heads of k; with those of q where the decay or the state handed in has them. Feed it back to go on with a
    sequence; gradients flow through it. A normalizer below 1e-6 in size is replaced by 1e-6 with its sign (of 0: +), so
    rows stay finite. The backward is written by hand and cannot be differentiated again; memory beyond inputs, outputs
    and gradients does not grow with t (but for one number a row where heads share keys; in half precision by one state
    of a head for every few thousand tokens). Causal attention in float32 and float64 on the CPU is computed token by
    token by a compiled kernel where numba is installed; otherwise, and if `chunk` is given, in chunks of so many
    tokens. Under torch.compile the op runs as it is, between compiled parts.
    """
    _check(q, k, v, log_decay, normalize, causal, state, chunk, mask)
    dtype = accumulate_dtype(q.dtype)
    mask = None if mask is None else mask.bool()
    if causal:
        carriers = [x for x in (log_decay, *(state or {}).values()) if x is not None]
        heads = max([k.shape[1], *(x.shape[1] for x in carriers)])
        S, z = _start(q, v, heads, state)
        decay = log_decay[..., None] if log_decay is not None and log_decay.ndim == 3 else log_decay
        setting = Setting(heads, chunk or CHUNK, dtype, native=chunk is None)
        out, S, z = LinearChunks.apply(q, k, v, decay, S, z if normalize else None, mask, setting)
    else:
        out, S, z = LinearRows.apply(q, k, v, mask, normalize, Setting(k.shape[1], chunk or BLOCK, dtype))
    check_finite({"out": out, "state": S}, {"q": q, "k": k, "v": v, "log_decay": log_decay, **(state or {})})
    return out, {"S": S, "z": z} if normalize else {"S": S}


def _start(q: Tensor, v: Tensor, heads: int, state: State | None) -> tuple[Tensor, Tensor | None]:
    if state is not None:
        return expand_heads(state["S"], heads), expand_heads(state["z"], heads) if "z" in state else None
    zeros = {"dtype": accumulate_dtype(q.dtype), "device": q.device}
    b, r = q.shape[0], q.shape[3]
    return torch.zeros(b, heads, r, v.shape[-1], **zeros), torch.zeros(b, heads, r, **zeros)


def _check(q, k, v, log_decay, normalize, causal, state, chunk, mask) -> None:
    check_attention(q, k, v, mask)
    check_count("chunk", chunk, 1)
    if not causal:
        for name, x in (("log_decay", log_decay), ("state", state)):
            if x is not None:
                raise AttngapError(f"{name} runs along the sequence and needs causal=True, got causal=False")
    if log_decay is not None:
        check_log_decay(log_decay, q, k)
    if state is not None:
        r, dv = q.shape[-1], v.shape[-1]
        check_state(state, {"S": (r, dv), "z": (r,)} if normalize else {"S": (r, dv)}, q, k)
