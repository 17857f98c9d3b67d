"""The far part of hybrid attention by flash-linear-attention's kernels, on CUDA.

Keys and values come `window` tokens late, as they leave the window; what is left is linear attention without a scale
and without a normalizer, which a column of ones beside the values adds up under the same weights:

    far_i = fq_i . (S + sum over j <= i of fk_j v_j^T)    mass_i = fq_i . (z + sum over j <= i of fk_j)

They are used where `pip install "attngap[cuda]"` put them, and only after they gave on this device what torch gives on
the CPU. `ATTNGAP_NATIVE=0` and `native.off()` turn them off, as all kernels. Single precision is multiplied in full:
`TRITON_F32_DEFAULT` is set to `ieee` unless it says otherwise, and `tf32` is faster with errors of 2e-3.
"""

import functools
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from attngap.ops import native
from attngap.ops.hybrid.layout import Layout
from attngap.ops.pairs import expand_heads

OLDEST = (0, 6)  # before, a scale of 1 could be compiled wrongly for some cards
WIDEST = 256  # features or values: as many as the tests compare
SPAN = 4096  # rows of one call: the kernels keep a state for every 64 of them
TILE = 16  # values are padded to a multiple of it, so that no row is read across an edge
PRECISION = "TRITON_F32_DEFAULT"
Far = tuple[Tensor, Tensor, Tensor, Tensor]  # rows (b, h, t, dv), mass (b, h, t), and S and z after them


def name() -> str:
    """As a receipt calls what computed the far part."""
    return f"flash-linear-attention {importlib.metadata.version('fla-core')}"


def usable(
    device: torch.device, dtype: torch.dtype, heads: int, width: int, value_width: int, *, tracked: bool = False
) -> bool:
    """Whether the kernels take such heads, `tracked` with gradients, and compute them rightly on this device."""
    if device.type != "cuda" or dtype == torch.float64 or not native.wanted():
        return False
    if not 1 < width <= WIDEST or value_width > WIDEST:
        return False
    return installed() and _agrees(device, heads, width, value_width, tracked)


def installed() -> bool:
    return importlib.util.find_spec("fla") is not None


def late(past: Tensor, new: Tensor, layout: Layout) -> Tensor:
    """(b, h_kv, t, width): in row i what leaves the window at token i, zeros where nothing does.

    `past` and `new` are features or values of tokens that are no sinks.
    """
    waiting = layout.window - layout.kept + layout.new_sinks
    return F.pad(torch.cat((past, new), 2), (0, 0, waiting, 0))[:, :, : layout.length]


def far_part(fq: Tensor, fk: Tensor, v: Tensor, S: Tensor, z: Tensor) -> Far:
    """fq (b, h, t, r) over fk and v of h_kv heads that come late, and the sums before them; all in S's precision."""
    kernel = _kernel()
    assert kernel is not None, "usable comes first"
    (_, h, t, _), (kv, dv) = fq.shape, (v.shape[1], v.shape[3])
    room = -(dv + 1) % TILE
    fq, fk, v = (x.to(S.dtype) for x in (fq, fk, v))
    values = F.pad(torch.cat((v, torch.ones_like(v[..., :1])), 3), (0, room))
    memory = expand_heads(F.pad(torch.cat((S, z[..., None]), 3), (0, room)), h)  # (b, h, r, dv + 1 + room)
    by_time = [x.transpose(1, 2) for x in (fq, expand_heads(fk, h), expand_heads(values, h))]
    parts = []
    for first in range(0, t, SPAN):
        cut = (x[:, first : first + SPAN] for x in by_time)
        options = {"scale": 1.0, "initial_state": memory, "output_final_state": True, "normalize": False}
        rows, memory = kernel(*cut, **options)
        parts.append(rows)
    rows, memory = torch.cat(parts, 1).transpose(1, 2), memory[:, :: h // kv]
    return rows[..., :dv], rows[..., dv], memory[..., :dv].contiguous(), memory[..., dv].contiguous()


@functools.cache
def _kernel() -> Callable[..., tuple[Tensor, Tensor]] | None:
    """Imported when first asked for: it takes seconds."""
    os.environ.setdefault(PRECISION, "ieee")
    try:
        found = importlib.metadata.version("fla-core")
        if tuple(int(part) for part in found.split(".")[:2]) < OLDEST:
            return _refuse(f"version {found} is too old, {'.'.join(map(str, OLDEST))} is needed")
        from fla.ops.linear_attn import chunk_linear_attn  # pyright: ignore[reportMissingImports]
    except Exception as error:  # it asks drivers and compilers when imported: whatever they raise, torch can do it
        return _refuse(_line(error))
    return chunk_linear_attn


@functools.cache
def _agrees(device: torch.device, heads: int, width: int, value_width: int, tracked: bool) -> bool:
    """Whether the kernels give on this device what torch gives on the CPU, in value and, if tracked, in gradient."""
    if _kernel() is None:
        return False
    draw = torch.Generator().manual_seed(0)
    with torch.inference_mode(False), torch.set_grad_enabled(tracked):
        sizes = ((150, width), (150, width), (150, value_width), (width, value_width), (width,))
        given = [torch.rand(1, heads, *size, generator=draw, dtype=torch.float64) for size in sizes]
        given = [x.requires_grad_(tracked) for x in given]
        expected = _everything(_definition, given, tracked)
        try:
            found = _everything(far_part, [x.to(device, torch.float32) for x in given], tracked)
        except Exception as error:  # compilers and drivers again
            return bool(_refuse(_line(error)))
        tolerance = 1e-4 if os.environ.get(PRECISION) == "ieee" else 1e-2
        away = max(float((x.cpu() - y).abs().max() / y.abs().max()) for x, y in zip(found, expected, strict=True))
    if not away < tolerance:
        _refuse(f"{width} features are off by {away:.1g} on {device}, allowed is {tolerance:.0e}")
    return away < tolerance


def _everything(compute: Callable[..., Far], given: list[Tensor], tracked: bool) -> list[Tensor]:
    """What is computed, and the gradients of the sum of its squares."""
    found = compute(*given)
    grads = torch.autograd.grad([x.square().sum() for x in found], given) if tracked else ()
    return [x.detach() for x in (*found, *grads)]


def _definition(fq: Tensor, fk: Tensor, v: Tensor, S: Tensor, z: Tensor) -> Far:
    weights = (fq @ fk.mT).tril()
    mass = weights.sum(-1) + (fq @ z[..., None])[..., 0]
    return weights @ v + fq @ S, mass, S + fk.mT @ v, z + fk.sum(2)


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


@functools.cache
def _refuse(reason: str) -> None:
    """Say once why torch computes it."""
    print(f"attngap: flash-linear-attention is not used, torch is: {reason}", file=sys.stderr)
