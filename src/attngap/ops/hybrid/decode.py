"""One token of all heads of a layer: hybrid heads by their state, kept heads by exact attention over their cache."""

import dataclasses

import torch
from torch import Tensor
from torch.nn import functional as F

from attngap.errors import AttngapError
from attngap.ops import native
from attngap.ops.hybrid.call import TokenCall
from attngap.ops.hybrid.state import State, check_hybrid_state, step
from attngap.ops.hybrid.table import CallSetting


@dataclasses.dataclass(frozen=True)
class KeptHeads:
    """Heads that read all keys instead of a state, and the cache of their keys, the new token included."""

    place: Tensor  # (h,) int64: where in the cache the keys of a head are, -1 for heads that are not kept
    keys: Tensor  # (b, groups, n, d)
    values: Tensor
    allowed: Tensor | None = None  # (b, n) bool: which of them may be read; None is all


@torch.no_grad()
def decode_step(
    state: State,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    fq: Tensor,
    fk: Tensor,
    gain: Tensor,
    *,
    window: int,
    sinks: int,
    scale: float,
    relative: bool,
    real: Tensor | None = None,
    kept: KeptHeads | None = None,
) -> Tensor:
    """(b, h, 1, dv), and the state is overwritten. All tensors are (b, heads, 1, .) but `gain`, (b, h, 1).

    `real` (b,) is False for sequences whose token is padding: their state stays, and their rows are zero. Sequences may
    differ in how much they have seen. A state may lack the features of its window: then `fk` is not of the token but of
    the one that leaves, and anything where none does. One compiled call where kernels can be used, torch elsewhere.
    """
    if kept is None:
        kept = KeptHeads(torch.full((q.shape[1],), -1, device=q.device), k[:, :1], v[:, :1])
    _check(state, q, k, v, fq, fk, gain, window, sinks, real, kept)
    options = {"window": window, "sinks": sinks, "scale": scale, "relative": relative}
    for name, x in state.items():
        state[name] = x.contiguous()  # what is expanded would be written more than once
    written = {x.untyped_storage().data_ptr() for x in state.values()}
    if any(x.untyped_storage().data_ptr() in written for x in (q, k, v, fq, fk, gain)):
        q, k, v, fq, fk, gain = (x.clone() for x in (q, k, v, fq, fk, gain))  # read after the state is written
    rings = [x for name, x in state.items() if name not in ("S", "count")]
    if native.usable(q, k, v, fq, fk, gain, kept.keys, kept.values, *rings, state=state["S"]):
        return _compiled(state, (q, k, v, fq, fk, gain), real, kept, options)
    return _torch(state, (q, k, v, fq, fk, gain), real, kept, options)


def _check(state: State, q, k, v, fq, fk, gain, window: int, sinks: int, real, kept: KeptHeads) -> None:
    (b, h, _, d), (_, heads, _, dv), r, n = q.shape, v.shape, fk.shape[3], kept.keys.shape[2]
    groups = kept.keys.shape[1]
    wanted = {
        "q": (q, (b, h, 1, d)),
        "k": (k, (b, heads, 1, d)),
        "v": (v, (b, heads, 1, dv)),
        "fq": (fq, (b, h, 1, r)),
        "fk": (fk, (b, heads, 1, r)),
        "gain": (gain, (b, h, 1)),
        "kept.place": (kept.place, (h,)),
        "kept.keys": (kept.keys, (b, groups, n, d)),
        "kept.values": (kept.values, (b, groups, n, dv)),
        "kept.allowed": (kept.allowed, (b, n)),
        "real": (real, (b,)),
    }
    for name, (x, size) in wanted.items():
        if x is not None and tuple(x.shape) != size:
            raise AttngapError(f"{name} must be {size} for one token of these heads, got {tuple(x.shape)}")
    if h % heads:
        raise AttngapError(f"the heads of q must be a multiple of those of k and v, got {h} and {heads}")
    if kept.place.dtype != torch.long or int(kept.place.max()) >= groups:
        raise AttngapError(
            f"kept.place must be int64 below the {groups} groups of kept.keys, got {kept.place.tolist()}"
        )
    check_hybrid_state(state, k, v, fk, window, sinks, features="fk" in state)


def _compiled(state: State, inputs, real, kept: KeptHeads, options: dict) -> Tensor:
    q, k, v, fq, fk, gain = inputs
    call = TokenCall(state, CallSetting(**options), kept.place)
    for name, x in (("fq", fq), ("fk", fk), ("gain", gain[..., None])):
        call.put(name, x)
    call.put_cache(kept.keys, kept.values, kept.keys.shape[2])
    if real is not None:
        call.put("real", real[:, None, None, None])
    if kept.allowed is not None:
        call.put("allowed", kept.allowed[:, None, :, None])
    return call.token(q, k, v).transpose(1, 2)


def _torch(state: State, inputs, real: Tensor | None, kept: KeptHeads, options: dict) -> Tensor:
    q, v = inputs[0], inputs[2]
    out = q.new_zeros(*q.shape[:3], v.shape[3])
    if real is None:
        out = step(state, *inputs, **options)
    elif len(rows := real.nonzero()[:, 0]):
        part = {name: x[rows] for name, x in state.items()}
        out[rows] = step(part, *(x[rows] for x in inputs), **options)
        for name, x in part.items():
            state[name][rows] = x
    heads = (kept.place >= 0).nonzero()[:, 0]
    if len(heads):
        keys, values = (x[:, kept.place[heads]] for x in (kept.keys, kept.values))
        mask = None if kept.allowed is None else kept.allowed[:, None, None]
        exact = F.scaled_dot_product_attention(q[:, heads], keys, values, attn_mask=mask, scale=options["scale"])
        exact = exact if real is None else exact.masked_fill(~real[:, None, None, None], 0.0)
        out = out.index_copy(1, heads, exact.to(out.dtype))
    return out
