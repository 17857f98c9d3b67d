"""The delta rule: a memory that is corrected instead of added to, in time linear in the sequence."""

from jaxtyping import Float, Shaped
from torch import Tensor

from attngap.ops.check import (
    accumulate_dtype,
    check_attention,
    check_count,
    check_finite,
    check_gate,
    check_log_decay,
    check_state,
)
from attngap.ops.delta.chunks import DeltaChunks
from attngap.ops.linear.chunks import Setting
from attngap.ops.pairs import expand_heads
from attngap.ops.uncompiled import uncompiled

State = dict[str, Tensor]
CHUNK = 64


@uncompiled
def delta_attention(
    q: Float[Tensor, "b h t r"],
    k: Float[Tensor, "b h_kv t r"],
    v: Float[Tensor, "b h_kv t dv"],
    beta: Float[Tensor, "b hb t"],
    *,
    log_decay: Float[Tensor, "b hg t"] | Float[Tensor, "b hg t r"] | None = None,
    state: State | None = None,
    chunk: int | None = None,
    mask: Shaped[Tensor, "b t"] | None = None,
) -> tuple[Float[Tensor, "b h t dv"], State]:
    """S_i = D_i S_{i-1} + beta_i k_i (v_i - k_i^T D_i S_{i-1})^T with D_i = diag(exp g_i); o_i = q_i^T S_i.

    The delta rule (arXiv 2102.11174, 2406.06484), gated by one number a token (2412.06464) or one a channel
    (2510.26692): `log_decay` g is (b, heads, t) or (b, heads, t, r), at most 0; it and `beta` have the heads of q or of
    k. q and k are taken as they are: scale and normalize them before. `mask` is (b, t), True at real tokens: others
    leave the state as it is and give zero rows.

    The state is {"S": (b, heads, r, dv)} in float32 (float64 for float64), with the heads of k; with those of q where a
    gate or the state handed in has them. Gradients flow through it. The backward is written by hand and cannot be
    differentiated again; memory beyond inputs, outputs and gradients does not grow with t (where a group's gates
    differ, or in half precision, by one state for every few chunks). In float32 and float64 on the CPU it is computed
    token by token by a compiled kernel where numba is installed, which keeps one more row for every row of v until the
    backward; otherwise, and if `chunk` is given, in chunks of so many tokens. Under torch.compile the op runs as it
    is, between compiled parts.
    """
    check_attention(q, k, v, mask)
    check_gate("beta", beta, q, k, vector=False)
    check_count("chunk", chunk, 1)
    if log_decay is not None:
        check_log_decay(log_decay, q, k)
    if state is not None:
        check_state(state, {"S": (q.shape[3], v.shape[3])}, q, k)
    dtype = accumulate_dtype(q.dtype)
    carriers = [x for x in (beta, log_decay, *(state or {}).values()) if x is not None]
    heads = max(k.shape[1], *(x.shape[1] for x in carriers))
    if state is None:
        S = q.new_zeros(q.shape[0], heads, q.shape[3], v.shape[3], dtype=dtype)
    else:
        S = expand_heads(state["S"], heads)
    decay = log_decay[..., None] if log_decay is not None and log_decay.ndim == 3 else log_decay
    mask = None if mask is None else mask.bool()
    setting = Setting(heads, chunk or CHUNK, dtype, native=chunk is None)
    out, S = DeltaChunks.apply(q, k, v, beta[..., None], decay, S, mask, setting)
    inputs = {"q": q, "k": k, "v": v, "beta": beta, "log_decay": log_decay, **(state or {})}
    check_finite({"out": out, "state": S}, inputs)
    return out, {"S": S}
