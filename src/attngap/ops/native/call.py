"""The kernels as functions of tensors: where results go, and what stands in for what is not there.

Kernels know addresses only, so every tensor has a name here that outlives the call.
"""

from typing import Any

import torch
from torch import Tensor

from attngap.ops import native, pages


def linear_forward(q, k, v, log_decay, S, z, mask) -> tuple[Tensor, Tensor, Tensor | None]:
    """out, S and z after the last token."""
    from attngap.ops.native import linear

    out = pages.empty((*q.shape[:3], v.shape[-1]), v.dtype, v.device)
    start, there = _z(S, z), _mask(q, mask)
    after_S, after_z = torch.empty_like(S), torch.empty_like(start)
    x = linear.Inputs(*_rows(q, k, v, S, start, there), normalize=z is not None)
    to = linear.Results(*_rows(out, after_S, after_z))
    native.run(
        linear.forward, (x, *_rows(log_decay), to), q.dtype, _lanes(q), _work(q, v), _scratch(q, v, linear.BUFFERS)
    )
    return out, after_S, None if z is None else after_z[..., 0]


def linear_backward(q, k, v, log_decay, S, z, mask, out, d_out, dS, dz, wanted: bool) -> tuple[Tensor | None, ...]:
    """The gradients of q, k, v, log_decay (if it is wanted), S and z."""
    from attngap.ops.native import linear

    dq, dk, dv = (pages.empty_like(x) for x in (q, k, v))
    d_decay = _for_decay(log_decay, wanted)
    start, there, end = _z(S, z), _mask(q, mask), _z(S, dz)
    before_S, before_z = torch.empty_like(S), torch.empty_like(start)
    # A row of dk is written after its normalizer was read; where heads share keys it already holds another's gradient.
    norms = dk if q.shape[1] == k.shape[1] else q.new_empty((*q.shape[:3], 1))
    x = linear.Inputs(*_rows(q, k, v, S, start, there), normalize=z is not None)
    above = linear.Above(*_rows(out, d_out, dS, end))
    to = linear.Grads(*_rows(dq, dk, dv, d_decay, before_S, before_z, norms))
    native.run(
        linear.backward,
        (x, *_rows(log_decay), above, to),
        q.dtype,
        _lanes(k),
        4 * _work(q, v),
        _scratch(q, v, linear.BUFFERS),
    )
    return dq, dk, dv, d_decay if wanted else None, before_S, None if z is None else before_z[..., 0]


def delta_forward(q, k, v, beta, log_decay, S, mask, keep: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """out, S after the last token, and u (see `native.delta`) if the backward is to have it."""
    from attngap.ops.native import delta

    out, after_S = pages.empty((*q.shape[:3], v.shape[-1]), v.dtype, v.device), torch.empty_like(S)
    u = pages.empty_like(out) if keep else None
    there = _mask(q, mask)
    x = delta.Inputs(*_rows(q, k, v, beta, S, there))
    to = delta.Results(*_rows(out, after_S))
    native.run(
        delta.forward,
        (x, *_rows(log_decay, u), to),
        q.dtype,
        _lanes(q),
        2 * _work(q, v),
        _scratch(q, v, delta.BUFFERS),
    )
    return out, after_S, u


def delta_backward(q, k, v, beta, log_decay, S, mask, u, d_out, dS, wanted: bool) -> tuple[Tensor | None, ...]:
    """The gradients of q, k, v, beta, log_decay (if it is wanted) and S; all must have the heads of q."""
    from attngap.ops.native import delta

    found = [pages.empty_like(x) for x in (q, k, v, beta)]
    results = *found, _for_decay(log_decay, wanted), torch.empty_like(S)
    there = _mask(q, mask)
    x = delta.Inputs(*_rows(q, k, v, beta, S, there))
    above, to = delta.Results(*_rows(d_out, dS)), delta.Grads(*_rows(*results))
    native.run(
        delta.backward,
        (x, *_rows(log_decay, u), above, to),
        q.dtype,
        _lanes(q),
        6 * _work(q, v),
        _scratch(q, v, delta.BUFFERS),
    )
    return *found, results[4] if wanted else None, results[5]


def convolution_forward(x, taps) -> Tensor:
    """silu of the convolution; x (b, t, c) and taps (n, c) contiguous."""
    from attngap.ops.native import convolution

    out = pages.empty_like(x)
    inputs, (to,) = convolution.Inputs(*_rows(x[:, None], taps[None, None])), _rows(out[:, None])
    native.run(convolution.forward, (inputs, to), x.dtype, _vectors(x), x.numel(), 0)
    return out


def convolution_backward(x, taps, d_out) -> tuple[Tensor, Tensor]:
    """The gradients of x and taps."""
    from attngap.ops.native import convolution

    dx, d_taps = pages.empty_like(x), x.new_empty(len(x), 1, *taps.shape)
    inputs, (above,) = convolution.Inputs(*_rows(x[:, None], taps[None, None])), _rows(d_out[:, None])
    to = convolution.Grads(*_rows(dx[:, None], d_taps))
    scratch = 2 * taps.numel() * taps.element_size()
    native.run(convolution.backward, (inputs, above, to), x.dtype, _vectors(x), 2 * x.numel(), scratch)
    return dx, d_taps.sum((0, 1))


def rescale_forward(x, length: float) -> tuple[Tensor, Tensor]:
    """The rows of x brought to a length, laid out as x is, and by what they were multiplied."""
    from attngap.ops.native import rescale

    y, factors = torch.empty_like(x), x.new_empty(*x.shape[:3], 1)
    of, *to = _rows(x, y, factors)
    native.run(rescale.forward, (of, length, *to), x.dtype, _lanes(x), x.numel(), 3 * _bytes(x))
    return y, factors


def rescale_backward(y, factors, dy, length: float) -> Tensor:
    from attngap.ops.native import rescale

    dx = torch.empty_like(y)
    *of, to = _rows(y, factors, dy, dx)
    native.run(rescale.backward, (*of, length, to), y.dtype, _lanes(y), y.numel(), 3 * _bytes(y))
    return dx


def _vectors(x: Tensor) -> int:
    """Of channels, in all sequences."""
    return x.shape[0] * x.shape[2] * x.element_size() // native.VECTOR


def _for_decay(log_decay: Tensor | None, wanted: bool) -> Tensor | None:
    """A place for its gradient; one number for all of it if nobody wants it."""
    if log_decay is None or wanted:
        return None if log_decay is None else pages.empty_like(log_decay)
    return log_decay.new_empty(()).expand(log_decay.shape)


def _rows(*tensors: Tensor | None) -> list[Any]:
    """As kernels know them; None stays None."""
    from attngap.ops.native.memory import Rows

    return [
        x if x is None else Rows(x.data_ptr(), *x.shape, *(step * x.element_size() for step in x.stride()))
        for x in tensors
    ]


def _z(S: Tensor, z: Tensor | None) -> Tensor:
    """(b, heads, r, 1)."""
    return S.new_zeros(()).expand(*S.shape[:3], 1) if z is None else z[..., None]


def _mask(q: Tensor, mask: Tensor | None) -> Tensor:
    """(b, 1, t, 1)."""
    b, _, t, _ = q.shape
    return torch.ones((), dtype=torch.bool).expand(b, 1, t, 1) if mask is None else mask[:, None, :, None]


def _scratch(q: Tensor, v: Tensor, pairs: int) -> int:
    """Bytes of two states, one the other way round, and of pairs of buffers."""
    r, dv = _bytes(q), _bytes(v)
    return q.shape[-1] * dv + v.shape[-1] * r + 2 * pairs * max(r, dv)


def _bytes(x: Tensor) -> int:
    """Of a row, filled up to whole panels."""
    return -(-x.shape[-1] * x.element_size() // native.PANEL) * native.PANEL


def _lanes(x: Tensor) -> int:
    return x.shape[0] * x.shape[1]


def _work(q: Tensor, v: Tensor) -> int:
    return q.numel() * v.shape[-1]
