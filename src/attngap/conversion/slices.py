"""Slices of long passages whose past the original has read: what heads do at any distance, at the price of the slice.

A model at 8,192 tokens costs minutes and, with gradients, more memory than there is. Here the original reads a passage
once and its keys, values and last states are kept; a few hundred tokens anywhere in it are then read anew, with some
heads replaced: their far features sum over the kept past, kept heads read all of it. Errors that replacements would
have made in the past itself are left out. What the original says of these tokens comes from its last states.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from attngap.conversion.choose import of_all
from attngap.conversion.joint import divergence
from attngap.heads.chain import again_by_layer
from attngap.heads.choice import HeadIndex, Keep
from attngap.heads.damage import frozen, label_directions
from attngap.heads.forward import body_of, forward
from attngap.mechanisms.base import Mechanism, State
from attngap.mechanisms.fit import Seen
from attngap.mechanisms.rotary import Angles
from attngap.mechanisms.variants.hybrid import Hybrid
from attngap.models.capture import Call, capture
from attngap.models.placement import device_of
from attngap.storage.overflow import Overflow

HELD = torch.float16  # of kept keys and values: they are read once each time a slice is
Add = Callable[[Call, Tensor, Tensor], Tensor | None]  # what else, of a call, its kept heads and what replaces all
CHECKED = 8  # tokens on which the output layer must give the model's own logits


class Kept(NamedTuple):
    """One layer's keys and values of whole passages, and how they were turned."""

    k: Float[Tensor, "b h_kv t d"]
    v: Float[Tensor, "b h_kv t dv"]
    rotary: Angles | None

    def only(self, which: slice) -> "Kept":
        if self.rotary is None:
            return Kept(self.k[which], self.v[which], None)
        cos, sin = (x if len(x) == 1 else x[which] for x in self.rotary)
        return Kept(self.k[which], self.v[which], (cos, sin))

    def before(self, start: int) -> tuple[Tensor, Tensor, Angles | None]:
        turned = None if self.rotary is None else (self.rotary[0][:, :start], self.rotary[1][:, :start])
        return self.k[:, :, :start].float(), self.v[:, :, :start].float(), turned


@dataclasses.dataclass(frozen=True, eq=False)
class Past:
    """Passages the original has read; `states` are its last hidden ones, where logits come from them alone."""

    tokens: Int[Tensor, "b t"]
    layers: Mapping[int, Kept]
    states: Float[Tensor, "b t d"] | None = None

    def only(self, place: int) -> "Past":
        """One of several passages that were read together."""
        one = slice(place, place + 1)
        layers = {layer: each.only(one) for layer, each in self.layers.items()}
        return Past(self.tokens[one], layers, None if self.states is None else self.states[one])


class Slice(NamedTuple):
    """Tokens start to stop of a passage, to be read after those before them."""

    past: Past
    start: int
    stop: int


class Shares(NamedTuple):
    """Zeros that a gradient is wanted for, one for each of some heads of a layer and each token."""

    heads: Int[Tensor, " m"]
    value: Float[Tensor, "m n"]


@torch.no_grad()
def read_past(
    model: PreTrainedModel,
    tokens: Int[Tensor, "b t"],
    note: Callable[[int, Seen], None] | None = None,
    kept: Overflow | None = None,
) -> Past:
    """Let the original read passages of one length; `note` gets what each layer read and wrote."""
    keep = (kept or Overflow()).keep
    layers: dict[int, Kept] = {}

    def watch(call: Call) -> None:
        if call.cross:
            return
        layers[call.layer] = Kept(keep(call.k.to(HELD)), keep(call.v.to(HELD)), call.rotary)
        if note is not None:
            note(call.layer, Seen(call.q, call.k, call.v, call.output, call.rotary))

    body = body_of(model)
    with capture(body, watch):
        found = forward(body, tokens)
    return Past(tokens, layers, found.last_hidden_state if states_give_logits(model, tokens[:1, :CHECKED]) else None)


@torch.no_grad()
def states_give_logits(model: PreTrainedModel, tokens: Int[Tensor, "1 t"]) -> bool:
    """Whether the output layer makes the logits of the last hidden states: no scaling, no cap, nothing between."""
    body, last = body_of(model), model.get_output_embeddings()
    if body is model or last is None:
        return False
    states, logits = forward(body, tokens).last_hidden_state, forward(model, tokens).logits
    made = last(states)
    return made.shape == logits.shape and torch.allclose(made.float(), logits.float(), rtol=1e-3, atol=1e-3)


@torch.no_grad()
def teacher_logits(
    model: PreTrainedModel, mechanisms: Mapping[int, Mechanism], piece: Slice
) -> Float[Tensor, "1 n vocabulary"]:
    """What the original says of the slice; read anew only where its last states do not tell."""
    states, last = piece.past.states, model.get_output_embeddings()
    if states is None or last is None:
        return read_slice(model, mechanisms, piece, None)
    return last(states[:, piece.start : piece.stop])


def read_slice(
    model: PreTrainedModel,
    mechanisms: Mapping[int, Mechanism],
    piece: Slice,
    keep: Keep | None,
    shares: Mapping[int, Shares] | None = None,
    before: Callable[[int], State] | None = None,
    add: Add | None = None,
) -> Float[Tensor, "1 n vocabulary"]:
    """Logits of the slice with all heads replaced but those in `keep`; with None every head keeps softmax.

    With `shares`, share_ht (softmax - replacement) is added to head h at token t. `before` gives a layer's state after
    the past where it is known; without, it is made of the past's keys, and gradients reach the features. `add` is given
    the call, which of its heads are kept and what replaces them all, and says what else to add to a layer's output.
    """
    past, start, stop = piece

    def watch(call: Call) -> Tensor | None:
        if call.cross:
            return None
        mechanism = mechanisms.get(call.layer)
        heads = [keep is None or (call.layer, head) in keep for head in range(call.heads)]
        kept = torch.tensor(heads, device=call.q.device)
        if mechanism is None:
            return _exact(call, past, start, torch.ones_like(kept))
        share = None if shares is None else shares.get(call.layer)
        exact = _exact(call, past, start, kept) if bool(kept.any()) else None
        if exact is not None and bool(kept.all()) and share is None:
            return exact
        state = state_of(mechanism, past.layers[call.layer], start) if before is None else before(call.layer)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not bool(kept.all())):
            replaced = _replaced(call, mechanism, state, start)
        out = replaced if exact is None else torch.where(kept[:, None, None], exact, replaced)
        more = None if add is None else add(call, kept, replaced.detach())
        out = out if more is None else out + more
        if share is None:
            return out
        with torch.no_grad():  # softmax of heads that are replaced is asked for by their shares alone
            asked = torch.zeros_like(kept).index_fill(0, share.heads, True) & ~kept
            other = _exact(call, past, start, asked) if bool(asked.any()) else torch.zeros_like(replaced)
            change = torch.where(kept[:, None, None], out, other) - replaced
        return out.index_add(1, share.heads, share.value[None, ..., None] * change[:, share.heads])

    tokens = past.tokens[:, start:stop].to(device_of(model))
    position = torch.arange(start, stop, device=tokens.device)[None]
    with again_by_layer(model, watch) if torch.is_grad_enabled() else capture(model, watch):
        return model(input_ids=tokens, position_ids=position, use_cache=False).logits


def _exact(call: Call, past: Past, start: int, wanted: Bool[Tensor, " h"]) -> Float[Tensor, "1 h n dv"]:
    """Softmax over the past and the slice, for the key heads that some wanted head reads; zeros elsewhere."""
    before = past.layers[call.layer]
    group = call.heads // call.kv_heads
    n = call.q.shape[2]
    keys = torch.arange(start + n, device=call.q.device)
    rows = keys[start:, None]
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


def state_of(mechanism: Mechanism, before: Kept, start: int) -> State:
    """Of the replacement after the past. For a gradient it is made twice: features of 8,192 keys of every layer take
    more memory than all the rest."""
    if not isinstance(mechanism, Hybrid):
        raise TypeError(f"slices need hybrids, got {mechanism.name}")

    def made() -> State:
        return mechanism.state_after(*before.before(start))

    if not torch.is_grad_enabled():
        return made()
    found = checkpoint(made, use_reentrant=False)
    assert isinstance(found, dict)
    return found


def _replaced(call: Call, mechanism: Mechanism, state: State, start: int) -> Float[Tensor, "1 h n dv"]:
    streams = mechanism.read(None, call.q, call.k, call.v, start=start, rotary=call.rotary)
    return mechanism.chunked(streams, state)[0]


class SliceReference:
    """The divergence from the original on some slices.

    States after the past are made once, and anew after `forget`, which whoever trains the replacements calls.
    """

    @torch.no_grad()
    def __init__(self, original: PreTrainedModel, mechanisms: Mapping[int, Mechanism], pieces: Sequence[Slice]):
        self.original, self.mechanisms, self.pieces = original, mechanisms, list(pieces)
        self._teachers = [teacher_logits(original, mechanisms, piece).to(HELD) for piece in pieces]
        self._states: dict[tuple[int, int], State] = {}

    def forget(self) -> None:
        """The replacements have changed."""
        self._states.clear()

    def put_state(self, place: int, layer: int, state: State) -> None:
        """The state before one of the slices, where it is not what the replacement alone makes of the past."""
        self._states[place, layer] = state

    def pairs(self) -> Iterator[tuple[int, Tensor]]:
        """The places of the slices and what the original says of them."""
        for place, teacher in enumerate(self._teachers):
            yield place, teacher.float()

    @torch.no_grad()
    def divergence(self, keep: Keep) -> Float[Tensor, " count"]:
        """With these heads kept, on each slice."""
        losses = [divergence(self.read(i, keep), teacher, is_language_model=True) for i, teacher in self.pairs()]
        return torch.stack(losses)

    def loss(self, piece: Slice, keep: Keep) -> Float[Tensor, ""]:
        """On any slice, with gradients of the features."""
        teacher = teacher_logits(self.original, self.mechanisms, piece)
        out = read_slice(self.original, self.mechanisms, piece, keep)
        return divergence(out, teacher, is_language_model=True)

    def head_damage(self, *, seed: int = 0) -> dict[HeadIndex, float]:
        """What replacing each head alone would do, as a share of what all come to."""
        generator = torch.Generator().manual_seed(seed)
        every = frozenset((layer, head) for layer, m in self.mechanisms.items() for head in range(m.heads))
        found = []
        for place in range(len(self.pieces)):
            shares = self._shares(place, every)
            with self.frozen(), torch.enable_grad():
                out = self.read(place, every, shares)
                found.append(_information(out, shares, generator))
        return of_all(found)

    def softmax_gains(
        self, keep: Keep, among: Keep | None = None, *, seed: int = 0
    ) -> tuple[dict[HeadIndex, float], Float[Tensor, " count"]]:
        """What softmax in each head `among` some gains the model as converted now, to second order; the divergences."""
        generator = torch.Generator().manual_seed(seed)
        every = frozenset((layer, head) for layer, m in self.mechanisms.items() for head in range(m.heads))
        losses, found = [], []
        for place, teacher in self.pairs():
            shares = self._shares(place, every if among is None else among)
            with self.frozen(), torch.enable_grad():
                out = self.read(place, keep, shares)
                loss = divergence(out, teacher, is_language_model=True)
                slopes = torch.autograd.grad(loss, [share.value for share in shares.values()], retain_graph=True)
                second = _information(out, shares, generator)
            for (layer, share), slope in zip(shares.items(), slopes, strict=True):
                for place_of, head in enumerate(share.heads.tolist()):
                    sign = 1.0 if (layer, head) in keep else -1.0
                    second[layer, head] = sign * second[layer, head] - float(slope[place_of].sum())
            found.append(second)
            losses.append(loss.detach())
        return of_all(found), torch.stack(losses)

    def read(
        self,
        place: int,
        keep: Keep,
        shares: Mapping[int, Shares] | None = None,
        add: Add | None = None,
    ) -> Tensor:
        """Logits of one of the slices, see `read_slice`."""
        piece = self.pieces[place]

        def before(layer: int) -> State:
            if (place, layer) not in self._states:
                with torch.no_grad():
                    made = state_of(self.mechanisms[layer], piece.past.layers[layer], piece.start)
                self._states[place, layer] = made
            return dict(self._states[place, layer])

        return read_slice(self.original, self.mechanisms, piece, keep, shares, before, add)

    def frozen(self) -> contextlib.ExitStack:
        """No gradients of weights, neither of the model's nor of the replacements'."""
        stack = contextlib.ExitStack()
        for part in (self.original, *self.mechanisms.values()):
            stack.enter_context(frozen(part))
        return stack

    def _shares(self, place: int, heads: Keep) -> dict[int, Shares]:
        rows = self.pieces[place].stop - self.pieces[place].start
        found = {}
        for layer, m in self.mechanisms.items():
            some = [head for head in range(m.heads) if (layer, head) in heads]
            if some:
                device = device_of(m)
                shares = torch.zeros(len(some), rows, requires_grad=True, device=device)
                found[layer] = Shares(torch.tensor(some, device=device), shares)
        return found


def _information(out: Tensor, shares: Mapping[int, Shares], generator: torch.Generator) -> dict[HeadIndex, float]:
    """Half the second derivative of the divergence in each head's share."""
    (direction,) = label_directions(out.detach(), generator)
    grads = torch.autograd.grad(out, [share.value for share in shares.values()], direction)
    return {
        (layer, head): float(grad[i].square().sum()) / out.shape[1] / 2
        for (layer, share), grad in zip(shares.items(), grads, strict=True)
        for i, head in enumerate(share.heads.tolist())
    }
