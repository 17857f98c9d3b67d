"""Compiled hybrid attention as functions of tensors: where results go, and what stands in for what is not there."""

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attngap.ops import native, pages
from attngap.ops.hybrid.blocks import Near
from attngap.ops.hybrid.state import Tokens
from attngap.ops.native.scratch import Scratch, lay_out
from attngap.ops.native.tensors import as_rows, plain_grads, row_bytes

MOST_PARTS = 8  # that a lane is cut into
SHORTEST = 128  # rows of a part
ENOUGH = 8  # lanes for each thread, handed out one by one, that keep them all busy


@dataclasses.dataclass(frozen=True)
class PieceSetting:
    """What does not change along a sequence."""

    window: int
    sinks: int
    scale: float
    relative: bool
    far: bool

    def options(self, x: Tensor, *, given: bool = False, parts: int = 1) -> Any:
        from attngap.ops.hybrid.kernels_layout import Options

        n = native.VECTOR // x.element_size()
        return Options(
            self.window,
            self.sinks,
            sink_tiles=-(-self.sinks // n),
            band=-(-(self.window - 1) // n) + 1,
            scale=self.scale,
            relative=self.relative,
            far=self.far,
            given=given,
            parts=parts,
        )


def forward(inputs, past, S, z, tokens: Tokens, setting: PieceSetting, near: Near | None, stats: list[Tensor]):
    """out, S and z after the piece; inputs are q, k, v, fq, fk, gain, past is k, v, fk of the state.

    `stats`, three tensors (b, h, t), are filled with the unit, the normalizer and the coefficient of each row.
    """
    q, _, v = inputs[:3]
    out = pages.empty((*q.shape[:3], v.shape[3]), v.dtype, v.device)
    if tokens.index is not None:
        out.zero_()
    x, held = kernel_inputs(inputs, past, S, z, tokens)
    given = None if near is None else (near.out, near.top[..., None], near.log_mass[..., None])
    after = run_forward(x, q, out, S, z, setting, forward_room(inputs, setting), given, [x[..., None] for x in stats])
    del held
    return out, *after


def run_forward(x, q, out, S, z, setting: PieceSetting, scratch: Scratch, near=None, stats=()) -> tuple[Tensor, Tensor]:
    """Fills out; S and z after the piece. A lane is cut into parts where threads would otherwise wait for the last."""
    from attngap.ops.hybrid import kernels
    from attngap.ops.hybrid.kernels_layout import Near as NearRows
    from attngap.ops.hybrid.kernels_layout import Results, Stats

    after_S, after_z = pages.empty_like(S), pages.empty_like(z)
    unused = [q.new_empty(()).expand(*q.shape[:3], 1)] * 3
    lanes, work = S.shape[0] * S.shape[1], update_count(q, out.shape[3], S.shape[2], setting)
    parts = _parts(lanes, native.thread_count(lanes * MOST_PARTS, work), q.shape[2], setting)
    arguments = (
        x,
        setting.options(q, given=near is not None, parts=parts),
        NearRows(*as_rows(*(near or unused))),
        Results(*as_rows(out, after_S, after_z[..., None])),
        Stats(*as_rows(*(stats or unused))),
        scratch.room,
    )
    native.run(kernels.forward, arguments, q.dtype, lanes * parts, work, scratch)
    return after_S, after_z


def _parts(lanes: int, threads: int, length: int, setting: PieceSetting) -> int:
    """The fewest with which every thread gets as much as the others; each at least as long as a window.

    A part first sums up the features of all tokens before it, about a tenth of the work on them.
    """
    most = min(MOST_PARTS, length // max(SHORTEST, setting.window))
    if lanes >= ENOUGH * threads:
        return 1
    return next((parts for parts in range(1, most + 1) if lanes * parts % threads == 0), max(1, most))


class HybridCompiled(torch.autograd.Function):
    """(q, k, v, fq, fk, gain, state k, v, fk, S, z, tokens, setting, near) -> out, S, z."""

    @staticmethod
    def forward(ctx, *arguments):
        sources, (tokens, setting, near) = arguments[:11], arguments[11:]
        inputs, past, (S, z) = sources[:6], sources[6:9], sources[9:]
        q = inputs[0]
        stats = [pages.empty(q.shape[:3], q.dtype, q.device) for _ in range(3)] if any(ctx.needs_input_grad) else []
        out, after_S, after_z = forward(inputs, past, S, z, tokens, setting, near, stats)
        ctx.save_for_backward(*sources, out, *stats)
        ctx.options = tokens, setting
        return out, after_S, after_z

    @staticmethod
    @once_differentiable
    def backward(ctx, *above):
        *sources, out, unit, norm, coefficient = ctx.saved_tensors
        tokens, setting = ctx.options
        wanted = ctx.needs_input_grad[:11]
        near = any(wanted[i] for i in (0, 1, 2, 6, 7))
        results = out, unit, norm, coefficient
        above = plain_grads(*above)
        S, z = sources[9:]
        found = backward(sources[:6], sources[6:9], S, z, tokens, setting, results, above, near=near)
        return (*(x if want else None for x, want in zip(found, wanted, strict=True)), None, None, None)


def kernel_inputs(inputs, past, S, z, tokens: Tokens, *, skipped: int = 0, table: int = 0) -> tuple[Any, Any]:
    """And what must live as long as their addresses are used."""
    from attngap.ops.hybrid.kernels_layout import Inputs

    q, k, v, fq, fk, gain = inputs
    held = (gain[..., None], z[..., None])
    rows = as_rows(q, k, v, fq, fk, held[0], *past, S, held[1])
    index = 0 if tokens.index is None else tokens.index.data_ptr()
    addresses = tokens.seen.data_ptr(), tokens.lengths.data_ptr(), index, skipped, table
    return Inputs._make((*rows, *addresses)), held


def forward_room(inputs, setting: PieceSetting, *, computed: bool = False) -> Scratch:
    from attngap.ops.hybrid.kernels_layout import Room

    q, k, v, fq = inputs[:4]
    size, n, d, group = q.element_size(), native.VECTOR // q.element_size(), q.shape[3], q.shape[1] // k.shape[1]
    kp, vp, fp = row_bytes(q), row_bytes(v), row_bytes(fq)
    options = setting.options(q)
    columns = options.sink_tiles + options.band
    sizes = {
        "keys_t": kp // size * columns * native.VECTOR,
        "values": (columns * n + fp // size) * vp,
        "weights": n * (columns * native.VECTOR + fp),
        "queries": n * kp,
        "fq": n * fp,
        "fk": 2 * n * fp,
        "fk_t": fp // size * 2 * native.VECTOR,
        "scores": n * 2 * native.VECTOR,
        "rows": max(n * vp, kp),
        "z": fp,
        "tile": n * kp,
        "gains": n * size,
    }
    parameters = {"query_weight": group * d * fp, "query_bias": group * fp, "query_scale": group * fp}
    parameters |= {"gain_weight": group * kp, "key_weight": d * fp, "key_bias": fp, "rate": fp}
    parameters |= {"content": n * kp, "cosines": n * kp, "sines": n * kp, "fading": n * fp}
    return lay_out(Room, sizes | {name: bytes if computed else 0 for name, bytes in parameters.items()})


def backward(inputs, past, S, z, tokens: Tokens, setting: PieceSetting, results, above, *, near: bool) -> list[Tensor]:
    """The gradients of q, k, v, fq, fk, gain, of k, v, fk of the state, of S and of z.

    `results` are out and the three statistics of `forward`, `above` the gradients of out, S and z. Without `near`,
    those of queries, keys and values are left out: fitting features does not need them.
    """
    from attngap.ops.hybrid import kernels_backward as kernels
    from attngap.ops.hybrid.kernels_gradients import Above, HybridGradRows

    q, k, v, fq, fk, gain = inputs
    unused = [q.new_empty(()).expand(x.shape) for x in (q, k, v, past[0], past[1])]
    dq, dk, dv, dpk, dpv = (pages.zeros_like(x) for x in (q, k, v, *past[:2])) if near else unused
    dfq, dfk, dpfk, dS, dz = (pages.zeros_like(x) for x in (fq, fk, past[2], S, z))
    d_gain = pages.zeros_like(gain)
    x, held = kernel_inputs(inputs, past, S, z, tokens)
    out, *stats = results
    d_out, d_after_S, d_after_z = above
    given = [out, *(x[..., None] for x in stats), d_out, d_after_S, d_after_z[..., None]]
    found = [dq, dk, dv, dfq, dfk, d_gain[..., None], dpk, dpv, dpfk, dS, dz[..., None]]
    scratch, work = backward_room(inputs, setting), update_count(q, v.shape[3], fq.shape[3], setting)
    arguments = (
        x,
        setting.options(q, given=not near),
        Above(*as_rows(*given)),
        HybridGradRows(*as_rows(*found)),
        scratch.room,
    )
    native.run(kernels.backward, arguments, q.dtype, S.shape[0] * S.shape[1], 3 * work, scratch)
    del held
    return [dq, dk, dv, dfq, dfk, d_gain, dpk, dpv, dpfk, dS, dz]


def backward_room(inputs, setting: PieceSetting) -> Scratch:
    from attngap.ops.hybrid.kernels_gradients import Room

    q, _, v, fq = inputs[:4]
    size, n = q.element_size(), native.VECTOR // q.element_size()
    kp, vp, fp = row_bytes(q), row_bytes(v), row_bytes(fq)
    options = setting.options(q)
    columns = options.sink_tiles + options.band
    wp = columns * native.VECTOR
    sizes = {
        "keys": columns * n * kp,
        "values": columns * n * vp,
        "d_keys": columns * n * kp,
        "d_values": columns * n * vp,
        "keys_t": kp // size * wp,
        "values_t": vp // size * wp,
        "weights": n * wp,
        "d_weights": n * wp,
        "queries": n * kp,
        "fq": n * fp,
        "grads": n * vp,
        "fk": 2 * n * fp,
        "fk_t": fp // size * 2 * native.VECTOR,
        "d_fk": 2 * n * fp,
        "scores": n * 2 * native.VECTOR,
        "d_scores": n * 2 * native.VECTOR,
        "rows": max(n * kp, n * vp, n * fp, wp),
        "S_t": vp // size * fp,
        "z": fp,
        "dS": fp // size * vp,
        "dS_t": vp // size * fp,
        "dz": fp,
        "mean": n * size,
        "coefficient": n * size,
        "unit": n * size,
    }
    return lay_out(Room, sizes)


def update_count(q: Tensor, value_dim: int, features: int, setting: PieceSetting) -> int:
    """Multiplications, about."""
    rows = q.shape[0] * q.shape[1] * q.shape[2]
    return rows * ((q.shape[3] + value_dim) * (setting.window + setting.sinks) + 2 * features * value_dim)
