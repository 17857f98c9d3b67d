"""Gates of groups between full attention and sinks + window, trained on slices of long passages."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

STEPS, RATE, PRICE = 24, 0.05, 0.02


def train_gates(
    original: Any, among: Sequence[int], pieces: Sequence[Any], window: int, sinks: int, steps: int = STEPS
) -> dict[int, list[float]]:
    """The gates of every group of these layers, one piece a step."""
    from attngap.conversion.joint import divergence
    from attngap.conversion.slices import teacher_logits
    from attngap.heads.damage import frozen

    groups = original.config.num_key_value_heads
    gate = {layer: torch.ones(groups, requires_grad=True) for layer in among}
    optimizer = torch.optim.Adam(gate.values(), lr=RATE)
    with torch.no_grad():
        wanted = [teacher_logits(original, {}, piece) for piece in pieces]
    with torch.enable_grad(), frozen(original):
        for step in range(steps):
            place = step % len(pieces)
            loss = divergence(
                gated(original, pieces[place], gate, window, sinks), wanted[place], is_language_model=True
            )
            price = PRICE * torch.stack([each.mean() for each in gate.values()]).mean()
            optimizer.zero_grad()
            (loss + price).backward()
            optimizer.step()
            with torch.no_grad():
                for each in gate.values():
                    each.clamp_(0, 1)
    return {layer: each.tolist() for layer, each in gate.items()}


def gated(original: Any, piece: Any, gate: Mapping[int, Tensor], window: int, sinks: int) -> Tensor:
    """Logits of a slice where each group mixes full attention and sinks + window by its gate; none: full."""
    from attngap.models.capture import Call, capture

    past, start, stop = piece
    keys = torch.arange(stop)
    rows = keys[start:, None]
    # Keys that neither a row's window nor the sinks hold need not be looked at a second time.
    close = torch.cat((keys[: min(sinks, start)], keys[max(min(sinks, start), start - window + 1) :]))
    near = (close <= rows) & ((close > rows - window) | (close < sinks))

    def watch(call: Call) -> Tensor:
        held, per = past.layers[call.layer], call.heads // call.kv_heads
        k, v = (
            torch.cat((old[:, :, :start].float(), new), 2).repeat_interleave(per, 1)
            for old, new in ((held.k, call.k), (held.v, call.v))
        )
        attend = torch.nn.functional.scaled_dot_product_attention
        full = attend(call.q, k, v, attn_mask=keys <= rows, scale=call.scale)
        if call.layer not in gate:
            return full
        streaming = attend(call.q, k[:, :, close], v[:, :, close], attn_mask=near, scale=call.scale)
        share = gate[call.layer].repeat_interleave(per)[:, None, None]
        return share * full + (1 - share) * streaming

    position = torch.arange(start, stop)[None]
    with capture(original, watch):
        return original(input_ids=past.tokens[:, start:stop], position_ids=position, use_cache=False).logits
