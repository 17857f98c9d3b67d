"""Slices of long passages whose past the original has read: what heads do at any distance, at the price of the slice.

A model at 8,192 tokens costs minutes and, with gradients, more memory than there is. Here the original reads a passage
once and its keys and values are kept; a few hundred tokens anywhere in it are then read anew, with some heads replaced:
their far features sum over the kept past, kept heads read all of it. Errors that replacements would have made in the
past itself are left out.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from attngap.conversion.joint import divergence
from attngap.heads.choice import HeadIndex, Keep
from attngap.heads.damage import frozen, label_directions
from attngap.heads.forward import body_of, forward
from attngap.mechanisms.base import Mechanism
from attngap.mechanisms.fit import Seen
from attngap.mechanisms.rotary import Angles
from attngap.mechanisms.variants.hybrid import Hybrid
from attngap.models.capture import Call, capture

HELD = torch.float16  # of kept keys and values: they are read once each time a slice is


class Kept(NamedTuple):
    """One layer's keys and values of a whole passage, and how they were turned."""

    k: Float[Tensor, "1 h_kv t d"]
    v: Float[Tensor, "1 h_kv t dv"]
    rotary: Angles | None

    def before(self, start: int) -> tuple[Tensor, Tensor, Angles | None]:
        turned = None if self.rotary is None else (self.rotary[0][:, :start], self.rotary[1][:, :start])
        return self.k[:, :, :start].float(), self.v[:, :, :start].float(), turned


@dataclasses.dataclass(frozen=True, eq=False)
class Past:
    """A passage the original has read."""

    tokens: Int[Tensor, "1 t"]
    layers: Mapping[int, Kept]


class Slice(NamedTuple):
    """Tokens start to stop of a passage, to be read after those before them."""

    past: Past
    start: int
    stop: int


@torch.no_grad()
def read_past(
    model: PreTrainedModel, tokens: Int[Tensor, "1 t"], note: Callable[[int, Seen], None] | None = None
) -> Past:
    """Let the original read a passage; `note` gets what each layer read and wrote."""
    layers: dict[int, Kept] = {}

    def watch(call: Call) -> None:
        if call.cross:
            return
        layers[call.layer] = Kept(call.k.to(HELD), call.v.to(HELD), call.rotary)
        if note is not None:
            note(call.layer, Seen(call.q, call.k, call.v, call.output, call.rotary))

    body = body_of(model)
    with capture(body, watch):
        forward(body, tokens)
    return Past(tokens, layers)


def read_slice(
    model: PreTrainedModel,
    mechanisms: Mapping[int, Mechanism],
    piece: Slice,
    keep: Keep | None,
    shares: Mapping[int, Float[Tensor, "h n"]] | None = None,
) -> Float[Tensor, "1 n vocabulary"]:
    """Logits of the slice with all heads replaced but those in `keep`; with None every head keeps softmax.

    With `shares`, zeros that a gradient is wanted for, share_ht (softmax - replacement) is added to head h at token t.
    """
    past, start, stop = piece

    def watch(call: Call) -> Tensor | None:
        if call.cross:
            return None
        mechanism = mechanisms.get(call.layer)
        kept = torch.tensor([keep is None or (call.layer, head) in keep for head in range(call.heads)])
        if mechanism is None:
            kept[:] = True
        everything = shares is not None and mechanism is not None
        out = call.output
        exact = _exact(call, past, start, kept | everything) if everything or bool(kept.any()) else None
        if mechanism is None or (bool(kept.all()) and not everything):
            return exact
        replaced = _replaced(call, mechanism, past.layers[call.layer], start)
        if exact is None:
            return replaced
        out = torch.where(kept[:, None, None], exact, replaced)
        if shares is None or call.layer not in shares:
            return out
        return out + shares[call.layer][..., None] * (exact - replaced).detach()

    position = torch.arange(start, stop, device=past.tokens.device)[None]
    with capture(model, watch):
        return model(input_ids=past.tokens[:, start:stop], position_ids=position, use_cache=False).logits


def _exact(call: Call, past: Past, start: int, wanted: Bool[Tensor, " h"]) -> Float[Tensor, "1 h n dv"]:
    """Softmax over the past and the slice, for the key heads that some wanted head reads; zeros elsewhere."""
    before = past.layers[call.layer]
    group = call.heads // call.kv_heads
    n = call.q.shape[2]
    keys = torch.arange(start + n)
    rows = torch.arange(start, start + n)[:, None]
    mask = keys <= rows
    if call.window is not None:
        mask = mask & (keys > rows - call.window)
    found = []
    for place in range(call.kv_heads):
        heads = slice(place * group, (place + 1) * group)
        if not bool(wanted[heads].any()):
            found.append(torch.zeros_like(call.output[:, heads]))
            continue
        k = torch.cat((before.k[:, place : place + 1, :start].float(), call.k[:, place : place + 1]), 2)
        v = torch.cat((before.v[:, place : place + 1, :start].float(), call.v[:, place : place + 1]), 2)
        found.append(
            F.scaled_dot_product_attention(
                call.q[:, heads],
                k.expand(-1, group, -1, -1),
                v.expand(-1, group, -1, -1),
                attn_mask=mask,
                scale=call.scale,
            )
        )
    return torch.cat(found, 1)


def _replaced(call: Call, mechanism: Mechanism, before: Kept, start: int) -> Float[Tensor, "1 h n dv"]:
    if not isinstance(mechanism, Hybrid):
        raise TypeError(f"slices need hybrids, got {mechanism.name}")
    k, v, rotary = before.before(start)
    state = mechanism.state_after(k, v, rotary)
    streams = mechanism.read(None, call.q, call.k, call.v, start=start, rotary=call.rotary)
    return mechanism.chunked(streams, state)[0]


class SliceReference:
    """The divergence from the original on some slices."""

    @torch.no_grad()
    def __init__(self, original: PreTrainedModel, mechanisms: Mapping[int, Mechanism], pieces: Sequence[Slice]):
        self.original, self.mechanisms, self.pieces = original, mechanisms, list(pieces)
        self._teachers = [read_slice(original, mechanisms, piece, None).to(HELD) for piece in pieces]

    def pairs(self) -> Iterator[tuple[Slice, Tensor]]:
        for piece, teacher in zip(self.pieces, self._teachers, strict=True):
            yield piece, teacher.float()

    @torch.no_grad()
    def divergence(self, keep: Keep) -> Float[Tensor, " count"]:
        """With these heads kept, on each slice."""
        return torch.stack([self.loss(piece, teacher, keep) for piece, teacher in self.pairs()])

    def loss(self, piece: Slice, teacher: Tensor, keep: Keep) -> Float[Tensor, ""]:
        out = read_slice(self.original, self.mechanisms, piece, keep)
        return divergence(out, teacher, is_language_model=True)

    def head_damage(self, *, seed: int = 0) -> dict[HeadIndex, float]:
        """What replacing each head alone would do, as a share of what all come to."""
        generator = torch.Generator().manual_seed(seed)
        every = frozenset((layer, head) for layer, m in self.mechanisms.items() for head in range(m.heads))
        found = []
        for piece in self.pieces:
            shares = self._shares(piece)
            with self._frozen(), torch.enable_grad():
                out = read_slice(self.original, self.mechanisms, piece, every, shares)
            found.append(_information(out, shares, generator))
        return of_all(found)

    def softmax_gains(self, keep: Keep, *, seed: int = 0) -> tuple[dict[HeadIndex, float], Float[Tensor, " count"]]:
        """What softmax in each head gains the model as converted now, to second order, and the divergences."""
        generator = torch.Generator().manual_seed(seed)
        losses, found = [], []
        for piece, teacher in self.pairs():
            shares = self._shares(piece)
            with self._frozen(), torch.enable_grad():
                out = read_slice(self.original, self.mechanisms, piece, keep, shares)
                loss = divergence(out, teacher, is_language_model=True)
            slopes = torch.autograd.grad(loss, list(shares.values()), retain_graph=True)
            second = _information(out, shares, generator)
            gains = {}
            for (layer, share), slope in zip(shares.items(), slopes, strict=True):
                sign = torch.tensor([1.0 if (layer, head) in keep else -1.0 for head in range(len(share))])
                gains[layer] = sign * second[layer] - slope.sum(-1)
            found.append(gains)
            losses.append(loss.detach())
        return of_all(found), torch.stack(losses)

    def _frozen(self) -> contextlib.ExitStack:
        """No gradients of weights, neither of the model's nor of the replacements'."""
        stack = contextlib.ExitStack()
        for part in (self.original, *self.mechanisms.values()):
            stack.enter_context(frozen(part))
        return stack

    def _shares(self, piece: Slice) -> dict[int, Float[Tensor, "h n"]]:
        rows = piece.stop - piece.start
        return {layer: torch.zeros(m.heads, rows, requires_grad=True) for layer, m in self.mechanisms.items()}


def _information(out: Tensor, shares: Mapping[int, Tensor], generator: torch.Generator) -> dict[int, Tensor]:
    (direction,) = label_directions(out.detach(), generator)
    grads = torch.autograd.grad(out, list(shares.values()), direction)
    return {layer: grad.square().sum(-1) / out.shape[1] / 2 for layer, grad in zip(shares, grads, strict=True)}


def of_all(found: Iterable[Mapping[int, Tensor]]) -> dict[HeadIndex, float]:
    """Mean over slices of each head's value relative to the sum of all positive ones: all slices weigh alike."""
    found = list(found)
    total: dict[HeadIndex, float] = {}
    for values in found:
        scale = sum(float(value.clamp(min=0).sum()) for value in values.values())
        for layer, value in values.items():
            for head, x in enumerate(value.tolist()):
                total[layer, head] = total.get((layer, head), 0.0) + x / max(scale, 1e-12) / len(found)
    return total
