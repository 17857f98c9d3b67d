"""Softmax attention: torch's fused kernel where it can serve, blocks of rows where it cannot."""

import math

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.nn import functional as F

from attngap.errors import AttngapError
from attngap.ops.check import accumulate_dtype, check_attention, check_count, check_finite
from attngap.ops.softmax.blocks import Reach, SoftmaxBlocks
from attngap.ops.uncompiled import uncompiled


@uncompiled
def softmax_attention(
    q: Float[Tensor, "b h t d"],
    k: Float[Tensor, "b h_kv t d"],
    v: Float[Tensor, "b h_kv t dv"],
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    sinks: int = 0,
    mask: Shaped[Tensor, "b t"] | None = None,
) -> Float[Tensor, "b h t dv"]:
    """o_i = sum_j w_ij v_j, w_ij = exp(scale q_i . k_j) over the sum of it on the keys row i may read.

    Vaswani et al., arXiv 1706.03762. `scale` is 1/sqrt(d) unless given. With `window` a row reads the last `window`
    keys, itself included (and as many after it if not causal), and the first `sinks` (arXiv 2309.17453), in time linear
    in t. `mask` is (b, t), True at real tokens: others are not read, do not count as positions, and give zero rows.

    Sums are kept in float32 (float64 for float64). Memory beyond inputs, outputs and gradients does not grow with the
    square of t. The backward cannot be differentiated again. Under torch.compile the op runs as it is, between compiled
    parts.
    """
    check_attention(q, k, v, mask)
    check_count("window", window, 1)
    check_count("sinks", sinks, 0)
    if scale is not None and not math.isfinite(scale):
        raise AttngapError(f"scale must be a finite number, got {scale}")
    softmax_scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    options = {"scale": softmax_scale, "causal": causal, "window": window, "sinks": sinks}
    if mask is None or bool(mask.all()):
        out = _dense(q, k, v, **options)
    else:
        rows = zip(q.split(1), k.split(1), v.split(1), mask.bool(), strict=True)
        out = torch.cat([_real_tokens(*row, **options) for row in rows])
    check_finite({"out": out}, {"q": q, "k": k, "v": v})
    return out


def _dense(q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool, window: int | None, sinks: int) -> Tensor:
    t, d = q.shape[2:]
    # The CPU kernel of torch leaves widths that differ to an n x n matrix, and on 16-bit types uses instructions that
    # some processors announce and do not have.
    fused = v.shape[-1] == d and (q.device.type != "cpu" or q.dtype in (torch.float32, torch.float64))
    if fused and (window is None or window >= t):
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped)
    return SoftmaxBlocks.apply(q, k, v, scale, Reach(t, causal, window, sinks), accumulate_dtype(q.dtype))


def _real_tokens(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, **options) -> Tensor:
    """One sequence (1, h, t, d) without its padding, and zero rows where the padding was."""
    t, index = mask.shape[0], mask.nonzero()[:, 0]
    if not len(index):
        return q.new_zeros(1, q.shape[1], t, v.shape[-1])
    first, last = int(index[0]), int(index[-1])
    if last - first + 1 == len(index):  # padding at the ends: views
        out = _dense(*(x[:, :, first : last + 1] for x in (q, k, v)), **options)
        return F.pad(out, (0, 0, first, t - 1 - last))
    out = _dense(*(x.index_select(2, index) for x in (q, k, v)), **options)
    return torch.zeros(*q.shape[:3], v.shape[-1], dtype=v.dtype, device=v.device).index_copy(2, index, out)
