"""Hybrid attention: exact softmax on sinks and a window, features on the rest, under one normalizer."""

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from attngap.errors import AttngapError
from attngap.ops import native
from attngap.ops.check import (
    accumulate_dtype,
    check_alike,
    check_attention,
    check_count,
    check_device,
    check_finite,
    check_width,
    shape,
)
from attngap.ops.hybrid import compiled, fla
from attngap.ops.hybrid.blocks import HybridBlocks, Near, forward_rows, split
from attngap.ops.hybrid.decode import decode_step
from attngap.ops.hybrid.layout import Layout
from attngap.ops.hybrid.merged import HybridMerged
from attngap.ops.hybrid.state import State, Tokens, check_hybrid_state, empty_state, push_piece, roll_up, unroll
from attngap.ops.uncompiled import uncompiled

BLOCKS = 32, 64  # rows computed at a time: about as many as a window is long, or most of what is computed is masked


@uncompiled
def hybrid_attention(
    q: Float[Tensor, "b h t d"],
    k: Float[Tensor, "b h_kv t d"],
    v: Float[Tensor, "b h_kv t dv"],
    fq: Float[Tensor, "b h t r"],
    fk: Float[Tensor, "b h_kv t r"],
    *,
    window: int,
    sinks: int = 4,
    scale: float | None = None,
    log_gain: Tensor | None = None,
    relative: bool = False,
    state: State | None = None,
    mask: Shaped[Tensor, "b t"] | None = None,
    chunk: int | None = None,
    inplace: bool = False,
    near: Near | None = None,
) -> tuple[Float[Tensor, "b h t dv"], State]:
    """Row i weighs its near keys by exp(scale q_i.k_j), all other past keys by exp(log_gain_i) fq_i.fk_j.

    Near keys are the first `sinks` and the last `window`, the row itself included; one normalizer serves both (LoLCATs,
    arXiv 2410.10254). With `relative` the features are measured against the row's largest near logit c_i, as
    exp(c_i + log_gain_i) fq_i.fk_j. Time is linear in t, the state constant in size. `log_gain` is None (zero), (h,) or
    (b, h, t); `mask` is (b, t), True at real tokens: others are not attended to, do not count as positions, and give
    zero rows. In float32 and float64 on the CPU a compiled kernel computes it where numba is installed; otherwise,
    and if `chunk` is given, in blocks of so many rows, on CUDA with the far part by flash-linear-attention's kernels
    where they are installed and no `chunk` is given. With `inplace` a state handed in is overwritten where that saves
    time, as in decoding; it needs torch.no_grad. `near`, from `near_attention` on the same q, k and v, spares computing
    the near part again: for fitting features to a whole unpadded sequence.

    A row is measured in units of the larger of its largest near weight and its far mass, so nothing overflows. A
    normalizer below 1e-6 in that unit (possible only with features of both signs) is replaced by 1e-6 with its sign.
    Gradients flow through the state too; the backward is written by hand, cannot be differentiated again, and keeps
    three numbers a row beyond inputs and outputs. Under torch.compile the op runs as it is, between compiled parts.
    """
    _check(q, k, v, fq, fk, window, sinks, log_gain, mask, chunk)
    softmax_scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    if state is None:
        state, fresh = empty_state(k, v, fk, window, sinks), True
    else:
        check_hybrid_state(state, k, v, fk, window, sinks)
        fresh = False
    tracked = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (q, k, v, fq, fk, log_gain, *state.values())
    )
    if inplace and tracked:
        raise AttngapError("inplace=True would overwrite what the backward needs: call under torch.no_grad()")
    if mask is not None and bool(mask.all()):
        mask = None
    if near is not None:
        _check_near(near, q, k, v, whole=fresh and mask is None)
    gain = _gain(log_gain, q)
    inputs = (q, k, v, fq, fk, gain)
    if q.shape[2] == 1 and near is None and not tracked:
        if not (inplace or fresh):
            state = {name: x.clone() for name, x in state.items()}
        real = None if mask is None else mask.bool()[:, 0]
        options = {"window": window, "sinks": sinks, "scale": softmax_scale, "relative": relative}
        out = decode_step(state, *inputs, **options, real=real)
    elif chunk is None and _compiled_fits(inputs, state):
        setting = compiled.PieceSetting(window, sinks, softmax_scale, relative, far=_has_features(fq, fk, state))
        out, state = _compiled_piece(inputs, state, mask, setting, near)
    else:
        options = {
            "window": window,
            "sinks": sinks,
            "chunk": chunk or _block(window),
            "scale": softmax_scale,
            "relative": relative,
        }
        sizes = q.shape[1], fq.shape[3], v.shape[3]
        by_fla = chunk is None and near is None and fla.usable(q.device, q.dtype, *sizes, tracked=tracked)
        out, state = _pieces(inputs, state, mask, options | {"near": near, "by_fla": by_fla})
    check_finite({"out": out}, {"q": q, "k": k, "v": v, "fq": fq, "fk": fk, "log_gain": log_gain})
    return out, state


def window_attention(
    q: Float[Tensor, "b h t d"],
    k: Float[Tensor, "b h_kv t d"],
    v: Float[Tensor, "b h_kv t dv"],
    *,
    window: int,
    sinks: int = 4,
    scale: float | None = None,
    state: State | None = None,
    mask: Shaped[Tensor, "b t"] | None = None,
    chunk: int | None = None,
    inplace: bool = False,
) -> tuple[Float[Tensor, "b h t dv"], State]:
    """Sinks and window only (StreamingLLM, arXiv 2309.17453): hybrid attention whose features are zero."""
    fq, fk = (x.new_zeros(()).expand(*x.shape[:3], 1) for x in (q, k))
    options = {"window": window, "sinks": sinks, "scale": scale, "chunk": chunk, "inplace": inplace}
    return hybrid_attention(q, k, v, fq, fk, state=state, mask=mask, **options)


@torch.no_grad()
def near_attention(
    q: Float[Tensor, "b h t d"],
    k: Float[Tensor, "b h_kv t d"],
    v: Float[Tensor, "b h_kv t dv"],
    *,
    window: int,
    sinks: int = 4,
    scale: float | None = None,
) -> Near:
    """What `hybrid_attention(..., near=...)` needs of the near keys, with the same window, sinks and scale."""
    fq, fk = (x.new_zeros(()).expand(*x.shape[:3], 1) for x in (q, k))
    _check(q, k, v, fq, fk, window, sinks, None, None, None)
    b, h, t, d = q.shape
    layout = Layout(0, min(sinks, t), 0, t, window, _block(window))
    acc = accumulate_dtype(q.dtype)
    out, stats = q.new_empty(b, h, t, v.shape[3], dtype=acc), [q.new_empty(b, h, t, dtype=acc) for _ in range(3)]
    state = empty_state(k, v, fk, window, sinks)
    sources = (q, k, v, fq, fk, _gain(None, q), *unroll(state, 0, window, sinks))
    for part, piece in split(layout, d**-0.5 if scale is None else float(scale), False, sources, None):
        S, z = state["S"][part].flatten(0, 1), state["z"][part].flatten(0, 1)[..., None]
        forward_rows(piece, S, z, out[part], [x[part] for x in stats])
    return Near(out, stats[0], stats[1].log().add_(stats[0]))


def _block(window: int) -> int:
    least, most = BLOCKS
    return min(max(window, least), most)


def _check_near(near: Near, q: Tensor, k: Tensor, v: Tensor, *, whole: bool) -> None:
    if not whole:
        raise AttngapError("near goes with a whole unpadded sequence: leave out state and mask, or leave out near")
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise AttngapError("near holds q, k and v fixed, but one of them requires a gradient: detach it, or omit near")
    if tuple(near.out.shape) != (*q.shape[:3], v.shape[3]):
        raise AttngapError(f"near was made for an output of {shape(near.out)}, q and v give {shape(q)}, {shape(v)}")


def _check(q, k, v, fq, fk, window, sinks, log_gain, mask, chunk) -> None:
    check_attention(q, k, v, mask)
    check_alike(q, fq=fq, fk=fk)
    for name, x, like, source in (("fq", fq, "q", q), ("fk", fk, "k", k)):
        if x.ndim != 4 or x.shape[:3] != source.shape[:3]:
            raise AttngapError(f"{name} must have the batch, heads and time of {like} {shape(source)}, got {shape(x)}")
    check_width("fk", fk, fq.shape[3], "fq")
    check_count("window", window, 1)
    check_count("sinks", sinks, 0)
    check_count("chunk", chunk, 1)
    b, h, t, _ = q.shape
    if log_gain is not None:
        if tuple(log_gain.shape) not in ((h,), (b, h, t)):
            raise AttngapError(f"log_gain must be ({h},) or ({b}, {h}, {t}), got {shape(log_gain)}")
        check_device("log_gain", log_gain, q)


def _gain(log_gain: Tensor | None, q: Tensor) -> Tensor:
    """(b, h, t) in the accumulating type, by broadcasting."""
    acc = accumulate_dtype(q.dtype)
    if log_gain is None:
        return q.new_zeros((), dtype=acc).expand(q.shape[:3])
    return (log_gain[None, :, None] if log_gain.ndim == 1 else log_gain).to(acc).expand(q.shape[:3])


def far_form(device: torch.device, dtype: torch.dtype, heads: int, width: int, value_width: int) -> str:
    """What computes the far part where several tokens of such heads are read, by name and version."""
    if fla.usable(device, dtype, heads, width, value_width):
        return fla.name()
    if device.type != "cpu":
        return "torch"
    state = torch.empty(1, 1, width, value_width, dtype=accumulate_dtype(dtype))
    return native.name() if native.usable(torch.empty((), dtype=dtype), state=state) else "torch"


def _compiled_fits(inputs: tuple[Tensor, ...], state: State) -> bool:
    rings = (state["k"], state["v"], state["fk"], state["z"])
    return native.usable(*inputs, *rings, state=state["S"])


def _has_features(fq: Tensor, fk: Tensor, state: State) -> bool:
    """Whether the far part can count: `window_attention` has one feature, and that is zero."""
    if fk.shape[3] > 1 or any(x.requires_grad for x in (fq, fk, state["fk"], state["S"], state["z"])):
        return True
    return any(bool(x.any()) for x in (fk, state["fk"], state["z"], state["S"]))


def _compiled_piece(
    inputs: tuple[Tensor, ...], state: State, mask: Tensor | None, setting: compiled.PieceSetting, near: Near | None
) -> tuple[Tensor, State]:
    """All sequences in one call, whatever they have seen and however they are padded."""
    _, k, v, _, fk, _ = inputs
    tokens = Tokens.of(state["count"], mask, k.shape[2])
    past = state["k"], state["v"], state["fk"]
    out, S, z = compiled.HybridCompiled.apply(*inputs, *past, state["S"], state["z"], tokens, setting, near)
    return out, push_piece(state, k, v, fk, tokens, setting.window, setting.sinks) | {"S": S, "z": z}


def _pieces(inputs: tuple[Tensor, ...], state: State, mask: Tensor | None, options: dict) -> tuple[Tensor, State]:
    """Sequences with the same count and the same padding share a layout: one call for each such group."""
    q, v, count = inputs[0], inputs[2], state["count"]
    if mask is None and len(set(count.tolist())) == 1:
        return _piece(inputs, state, int(count[0]), **options)
    real = torch.ones_like(q[:, 0, :, 0], dtype=torch.bool) if mask is None else mask.bool()
    kinds, member = torch.unique(torch.cat((count[:, None], real.long()), 1), dim=0, return_inverse=True)
    out = q.new_zeros(*q.shape[:3], v.shape[3])
    states, order = [], []
    for kind in range(len(kinds)):
        which = (member == kind).nonzero()[:, 0]
        tokens = real[which[0]].nonzero()[:, 0]
        old = {name: x[which] for name, x in state.items()}
        if len(tokens):
            cut = tuple(x[which][:, :, tokens] for x in inputs)
            part, old = _piece(cut, old, int(kinds[kind, 0]), **options)
            out[which[:, None], :, tokens] = part.transpose(1, 2)
        states.append(old)
        order.append(which)
    back = torch.cat(order).argsort()
    return out, {name: torch.cat([part[name] for part in states])[back] for name in state}


def _piece(
    inputs: tuple[Tensor, ...],
    state: State,
    count: int,
    *,
    window: int,
    sinks: int,
    chunk: int,
    scale,
    relative,
    near,
    by_fla,
) -> tuple[Tensor, State]:
    """All sequences have seen `count` tokens and have no padding in this piece."""
    q, k, v, fq, fk, gain = inputs
    t = q.shape[2]
    old_sinks = min(count, sinks)
    new_sinks = min(sinks - old_sinks, t)
    past = unroll(state, count, window, sinks)
    layout = Layout(old_sinks, new_sinks, past[2].shape[2], t, window, chunk)
    before = state["S"], state["z"]
    if by_fla:
        keys = fla.late(past[2], fk[:, :, new_sinks:], layout)
        values = fla.late(past[1][:, :, old_sinks:], v[:, :, new_sinks:], layout)
        far, mass, S, z = fla.far_part(fq, keys, values, *before)
        out = HybridMerged.apply(q, k, v, gain, *past[:2], far, mass, layout, scale, relative)
    else:
        out, S, z = HybridBlocks.apply(q, k, v, fq, fk, gain, *past, *before, layout, scale, relative, near)
    return out, {
        "k": roll_up(past[0], k, count, window, sinks),
        "v": roll_up(past[1], v, count, window, sinks),
        "fk": roll_up(past[2], fk[:, :, new_sinks:], max(0, count - sinks), window, 0),
        "S": S,
        "z": z,
        "count": state["count"] + t,
    }
