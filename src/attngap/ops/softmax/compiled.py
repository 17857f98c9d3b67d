"""Compiled softmax of some heads over their cache, as a function of tensors."""

import torch
from torch import Tensor

from attngap.errors import AttngapError
from attngap.ops import native
from attngap.ops.native.scratch import Scratch, lay_out
from attngap.ops.native.tensors import as_rows, row_bytes
from attngap.ops.uncompiled import plain_tensor


def can_attend(q: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> bool:
    """On the CPU, all in float32 or all in float64."""
    if not native.on() or q.dtype not in (torch.float32, torch.float64):
        return False
    return all(x.device.type == "cpu" and x.dtype == q.dtype for x in (q, keys, values, out))


@torch.no_grad()
def attend_into(
    out: Tensor,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    place: Tensor,
    *,
    scale: float | None = None,
    allowed: Tensor | None = None,
) -> None:
    """Softmax attention of the heads whose `place` is not negative, written to their rows of out (b, h, t, dv).

    q (b, h, t, d) are the last t of the n tokens of keys (b, groups, n, d) and values; row i reads keys up to its own.
    `place` (h,) int64 says which group of keys a head reads. `allowed` (b, n) is False at keys that nobody may read;
    rows that may read none are zero.
    """
    (b, h, t, d), (_, groups, n, dv) = q.shape, values.shape
    wanted = {"keys": (keys, (b, groups, n, d)), "out": (out, (b, h, t, dv)), "place": (place, (h,))}
    wanted |= {"allowed": (allowed, (b, n)), "values": (values, (b, groups, n, dv))}
    for name, (x, size) in wanted.items():
        if x is not None and tuple(x.shape) != size:
            raise AttngapError(f"{name} must be {size} for these rows and keys, got {tuple(x.shape)}")
    if t > n or place.dtype != torch.long or int(place.max()) >= groups:
        raise AttngapError(
            f"place must be int64 below the {groups} groups of keys, and {n} keys must include those of {t} rows; got "
            f"{place.tolist()}"
        )
    _run(out, q, keys, values, place, q.shape[3] ** -0.5 if scale is None else scale, allowed)


def _run(out: Tensor, q: Tensor, keys: Tensor, values: Tensor, place: Tensor, scale: float, allowed) -> None:
    from attngap.ops.softmax import kernels

    (b, _, t, d), n, dv = q.shape, keys.shape[2], values.shape[3]
    heads = (place >= 0).nonzero()
    pairs = torch.cat((heads, place[heads]), 1).contiguous()
    if not len(pairs) or not b * t:
        return
    q, keys, values = (plain_tensor(name, x) for name, x in (("q", q), ("keys", keys), ("values", values)))
    may = None if allowed is None else allowed.to(torch.bool).contiguous()
    addresses = 0 if may is None else may.data_ptr(), pairs.data_ptr(), len(pairs), float(scale)
    scratch = exact_room(q, values)
    work = b * len(pairs) * t * (n - t // 2) * (d + dv)
    units = b * len(pairs) * -(-t // kernels.BLOCK)
    x = kernels.Inputs._make((*as_rows(q, keys, values, out), *addresses))
    native.run(kernels.attend, (x, scratch.room), q.dtype, units, work, scratch)


def exact_room(q: Tensor, values: Tensor) -> Scratch:
    from attngap.ops.softmax import kernels

    size, kp, vp = q.element_size(), row_bytes(q), row_bytes(values)
    wp, n = kernels.TILES * native.VECTOR, native.VECTOR // q.element_size()
    sizes = {"queries": kernels.BLOCK * kp, "weights": kernels.BLOCK * wp, "result": kernels.BLOCK * vp}
    sizes |= {"tile": n * kp, "keys_t": kp // size * wp, "values": kernels.TILES * n * vp, "hidden": wp}
    return lay_out(kernels.Room, sizes | {"top": kernels.BLOCK * size, "norm": kernels.BLOCK * size})
