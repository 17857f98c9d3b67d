"""Calibration at the length a conversion is for: long passages that the original reads once, and slices of them.

One passage is as long as that, text in which numbers are stated and asked for at its end; another, half as long, is a
random sequence repeated with a period up to half of it: reading takes time that grows with the square of the length.
Features are fitted to them beside the short ones; heads are chosen, and all replacements fitted together, on slices of
all of them.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel

from attngap.conversion.calibration import period_of
from attngap.conversion.joint import geometric_mean, pace
from attngap.conversion.slices import HELD, Past, Slice, SliceReference, read_past
from attngap.heads.choice import Keep
from attngap.heads.damage import frozen
from attngap.mechanisms.base import Mechanism
from attngap.mechanisms.fit import Seen
from attngap.mechanisms.variants.hybrid import Hybrid
from attngap.storage.overflow import Overflow

ROWS = 256  # of a slice
RATE = 3e-4  # of joint steps: at 7e-4 ten of them raised the divergence on repeated tokens by a quarter


class LongCalibration:
    """The passages of one conversion as the original read them, and the slices that judge it.

    `short` are passages of one length, the last `heldout` of which judge; `facts` is long text whose end asks for what
    was stated in it, `repeated` a sequence that begins anew. No replacement changes the first `exact` tokens.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        short: Int[Tensor, "count context"],
        facts: Int[Tensor, "1 length"],
        repeated: Int[Tensor, "1 t"],
        *,
        heldout: int,
        exact: int,
        folder: Path | None = None,
    ):
        self.model, self.short, self.heldout, self.exact = model, short, heldout, exact
        self.facts, self.repeated = facts, repeated
        self._seen: dict[int, list[Seen]] = {}
        self._long: list[Past] = []
        self._short: dict[int, Past] = {}
        self._kept = Overflow(folder)

    def read(self, advance: Callable[..., None]) -> None:
        """Let the original read the long passages."""

        def note(layer: int, seen: Seen) -> None:
            q, k, v, target = (self._kept.keep(x.to(HELD)) for x in seen[:4])
            self._seen.setdefault(layer, []).append(Seen(q, k, v, target, seen.rotary))

        for tokens in (self.facts, self.repeated):
            self._long.append(read_past(self.model, tokens, note, self._kept))
            advance()

    def read_short(self, note: Callable[[int, Seen], None]) -> None:
        """Let it read the short ones, all at once."""
        whole = read_past(self.model, self.short, note, self._kept)
        self._short = {place: whole.only(place) for place in range(len(self.short))}

    def seen(self, layer: int) -> Sequence[Seen]:
        """What a layer read and wrote in the long ones; handed out once, for it is large."""
        found = self._seen.pop(layer, [])
        return [Seen._make((*(x.float() for x in each[:4]), each.rotary)) for each in found]

    def _past(self, place: int) -> Past:
        if place not in self._short:  # a resumed run has not read them yet
            self._short[place] = read_past(self.model, self.short[place : place + 1], kept=self._kept)
        return self._short[place]

    def judges(self) -> list[Slice]:
        """The ends of the held-out passages and of the long ones, and a place amid the long text."""
        context = self.short.shape[1]
        first = max(min(self.exact, context // 2), context - ROWS)
        ends = [Slice(self._past(len(self.short) - 1 - i), first, context) for i in range(self.heldout)]
        facts, repeated = self._long
        length, again = facts.tokens.shape[1], repeated.tokens.shape[1]
        amid = length // 2 - ROWS // 2
        return [
            *ends,
            Slice(facts, length - ROWS, length),
            Slice(facts, amid, amid + ROWS),
            Slice(repeated, again - ROWS, again),
        ]

    def text_slices(self) -> list[Slice]:
        """Text near and far, which says how much of the past a layer must read exactly."""
        facts = self._long[0]
        length = facts.tokens.shape[1]
        starts = [length * quarter // 4 - ROWS // 2 for quarter in (1, 2, 3)]
        return [*self.judges()[: min(2, self.heldout)], *(Slice(facts, start, start + ROWS) for start in starts)]

    def slices(self, steps: int, seed: int) -> Iterator[Slice]:
        """What joint steps see: short and long passages in turns, at random places that judge nothing."""
        generator = torch.Generator().manual_seed(seed)
        train = len(self.short) - self.heldout
        held = [(piece.past, piece.start, piece.stop) for piece in self.judges()]
        for step in range(steps):
            if step % 2:
                past = self._long[step // 2 % 2]
                first = self.exact if past is self._long[0] else period_of(self.repeated)
            else:
                past, first = self._past(int(torch.randint(train, (), generator=generator))), self.exact
            size = past.tokens.shape[1]
            last = max(0, size - ROWS)
            while True:
                start = int(torch.randint(min(first, last), last + 1, (), generator=generator))
                if not any(p is past and start < stop and begin < start + ROWS for p, begin, stop in held):
                    break
            yield Slice(past, start, min(start + ROWS, size))


def fit_slices(
    reference: SliceReference, keep: Keep, slices: Iterator[Slice], steps: int, advance: Callable[..., None]
) -> tuple[float, float]:
    """Train all replacements in place, one slice per step; the reference's divergence before and after.

    Where it has risen, the parameters are as they were before.
    """
    model, mechanisms = reference.original, reference.mechanisms
    trained = [p for m in mechanisms.values() for p in m.parameters()]
    begun = [p.detach().clone() for p in trained]
    before = geometric_mean(reference.divergence(keep))
    reference.forget()
    optimizer = torch.optim.Adam(trained, lr=RATE)
    with frozen(model):
        for step, piece in enumerate(slices):
            for each in optimizer.param_groups:
                each["lr"] = RATE * pace(step, steps)
            optimizer.zero_grad()
            loss = reference.loss(piece, keep)
            loss.backward()
            optimizer.step()
            advance(note=f"divergence {loss.item():.4f}")
    reference.forget()
    after = geometric_mean(reference.divergence(keep))
    with torch.no_grad():
        for p, start in zip(trained, begun, strict=True):
            p.grad = None
            if not after < before or math.isnan(after):
                p.copy_(start)
    reference.forget()
    return before, min(before, after)


def long_enough(mechanisms: Mapping[int, Mechanism], length: int, context: int) -> bool:
    """Whether slices can be had: every replacement is a hybrid whose features hold beyond the short passages."""
    able = all(isinstance(m, Hybrid) and m.reach is None for m in mechanisms.values())
    return bool(mechanisms) and able and length >= max(2 * context, 8 * ROWS)
