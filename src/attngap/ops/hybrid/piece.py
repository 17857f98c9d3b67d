"""A piece of a sequence by a compiled call that also computes the features: for reading prompts, without gradients."""

from collections.abc import Mapping

import torch
from torch import Tensor

from attngap.ops import native, pages
from attngap.ops.check import check_finite
from attngap.ops.hybrid.compiled import PieceSetting, forward_room, kernel_inputs, run_forward, update_count
from attngap.ops.hybrid.state import State, Tokens
from attngap.ops.hybrid.table import CallSetting, CallTable, shapes_of


@torch.no_grad()
def advance_piece(
    state: State,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    setting: CallSetting,
    parameters: Mapping[str, Tensor],
    position: Tensor,
    *,
    angles: tuple[Tensor, Tensor] | None = None,
    mask: Tensor | None = None,
    skipped: Tensor | None = None,
    keeps: bool = True,
) -> Tensor:
    """(b, h, t, dv), as a view of (b, t, h, dv); the state, which must be contiguous, is overwritten.

    `parameters` are those of prototypes, with four axes as `table.shapes_of` says; `position` (b,) counts the tokens
    before for the features; `angles` are cos and sin (1 or b, t, w); `mask` (b, t) is True at real tokens. `skipped`,
    (h,) int64, is not 0 for heads whose output nobody reads: their rows are left as they are, and key heads that none
    reads are left out of the state. Without `keeps` the rings of the state stay as they are.
    """
    (b, h, t, d), (_, kv, r, dv) = q.shape, state["S"].shape
    table = CallTable(q.dtype, shapes_of(b, h, kv, t, d, dv, r, setting.sinks + setting.window, setting.window))
    for name, x in parameters.items():
        table.put(name, x)
    for name, x in zip(("cos", "sin"), angles or (), strict=False):
        table.put(name, x[:, None].expand(b, -1, -1, -1))
        table.check_angles(setting, x)
    table.put_setting(setting, position=position)
    tokens = Tokens.of(state["count"], None if mask is None or bool(mask.all()) else mask, t)
    out = pages.empty((b, t, h, dv), v.dtype, v.device).transpose(1, 2)
    if tokens.index is not None:
        out.zero_()
    unused = q.new_empty(())
    inputs = (q, k, v, unused.expand(b, h, t, r), unused.expand(b, kv, t, r), unused.expand(b, h, t))
    past = state["k"], state["v"], state["fk"]
    address = 0 if skipped is None else skipped.data_ptr()
    x, held = kernel_inputs(inputs, past, state["S"], state["z"], tokens, skipped=address, table=table.address)
    piece = PieceSetting(setting.window, setting.sinks, setting.scale, setting.relative, far=True)
    scratch = forward_room(inputs, piece, computed=True)
    state["S"], state["z"] = run_forward(x, q, out, state["S"], state["z"], piece, scratch)
    if keeps:
        _keep(x, q, state, piece, scratch)
        state["count"] += tokens.lengths
    del held
    read = out if skipped is None else out[:, skipped == 0]
    check_finite({"out": read}, {"q": q, "k": k, "v": v, **parameters})
    return out


def _keep(x, q: Tensor, state: State, piece: PieceSetting, scratch) -> None:
    """The rings of the state."""
    from attngap.ops.hybrid import kernels

    b, kv, r, dv = state["S"].shape
    last = q[:, :kv, : piece.window]
    work = update_count(last, dv, r, piece)
    native.run(kernels.keep, (x, piece.options(q), scratch.room), q.dtype, b * kv, work, scratch)
