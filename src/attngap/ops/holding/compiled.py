"""The compiled form as a function of tensors."""

import torch
from torch import Tensor

from attngap.ops import native
from attngap.ops.holding.choosing import FADING, Turns
from attngap.ops.native.scratch import Scratch, lay_out


def choose_compiled(turns: Turns, k: Tensor, asked: Tensor, score: Tensor) -> tuple[Tensor, Tensor]:
    """What is held in each turn and after the last, and what each loses; the scores (h_kv, n) are overwritten."""
    from attngap.ops.holding import kernels

    (kv, n, d), (count, _, rows, _) = k.shape, asked.shape
    k, asked = k.contiguous(), asked.contiguous()
    held = torch.empty(count + 1, kv, turns.held, dtype=torch.long)
    held[0] = torch.arange(turns.sinks, turns.sinks + turns.held)
    lost = torch.empty(count, kv, turns.turn, dtype=torch.long)
    assert score.is_contiguous()
    assert n >= turns.slots + (count - 1) * turns.turn
    sizes = count, kv, n, d, rows, turns.sinks, turns.slots, turns.held, turns.turn, turns.every
    addresses = (x.data_ptr() for x in (k, asked, score, held, lost))
    scratch = choosing_room(turns, d, k.element_size())
    given = kernels.Inputs._make((*addresses, *sizes, FADING)), scratch.room
    native.run(kernels.choose, given, k.dtype, kv, count * kv * rows * turns.slots * d, scratch)
    return held, lost


def choosing_room(turns: Turns, d: int, size: int) -> Scratch:
    from attngap.ops.holding import kernels

    slots = -(-turns.slots // kernels.AT_ONCE) * kernels.AT_ONCE
    sizes = {"queries": d * native.VECTOR, "logits": slots * native.VECTOR, "weights": slots * size + native.VECTOR}
    competing = turns.held + turns.turn
    return lay_out(
        kernels.Room,
        sizes | {"keys": 8 * slots, "places": 8 * competing, "scores": size * competing, "sorted": size * competing},
    )
