"""Calibration at the length a conversion is for: long passages that the original reads once, and slices of them.

Two passages are as long as that: text in which numbers are stated and asked for at its end, and a random sequence
repeated with a period up to half of it. Features are fitted to them beside the short ones; heads are chosen, and all
replacements fitted together, on slices of both.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from attngap.conversion.calibration import period_of, repeats, with_facts
from attngap.conversion.joint import geometric_mean, pace
from attngap.conversion.slices import HELD, Past, Slice, SliceReference, read_past, read_slice
from attngap.heads.choice import Keep, best_heads
from attngap.heads.damage import frozen
from attngap.mechanisms.base import Mechanism
from attngap.mechanisms.fit import Seen
from attngap.mechanisms.variants.hybrid import Hybrid

ROWS = 256  # of a slice
SHRINK = 1.7  # by how much each round makes a keep set smaller
RATE = 3e-4  # of joint steps: at 7e-4 ten of them raised the divergence on repeated tokens by a quarter


class LongCalibration:
    """The long passages of one conversion and the slices that judge it."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        text: str | list[str] | None,
        short: Int[Tensor, "count context"],
        *,
        heldout: int,
        length: int,
        window: int,
        exact: int,
        seed: int,
    ):
        self.model, self.short, self.heldout, self.exact, self.length = model, short, heldout, exact, length
        self.facts = with_facts(tokenizer, text, context=length, seed=seed)
        self.repeated = repeats(tokenizer, context=length, beyond=window, seed=seed)
        self._seen: dict[int, list[Seen]] = {}
        self._long: list[Past] = []
        self._short: dict[int, Past] = {}

    def read(self, advance: Callable[..., None]) -> None:
        """Let the original read the long passages."""

        def note(layer: int, seen: Seen) -> None:
            q, k, v, target = (x.to(HELD) for x in seen[:4])
            self._seen.setdefault(layer, []).append(Seen(q, k, v, target, seen.rotary))

        for tokens in (self.facts, self.repeated):
            self._long.append(read_past(self.model, tokens, note))
            advance()

    def seen(self, layer: int) -> Sequence[Seen]:
        """What a layer read and wrote in them; handed out once, for it is large."""
        found = self._seen.pop(layer, [])
        return [Seen._make((*(x.float() for x in each[:4]), each.rotary)) for each in found]

    def _past(self, place: int) -> Past:
        if place not in self._short:
            self._short[place] = read_past(self.model, self.short[place : place + 1])
        return self._short[place]

    def judges(self) -> list[Slice]:
        """The ends of the held-out passages; of the long ones their ends and a place amid each."""
        context, length = self.short.shape[1], self.length
        first = max(min(self.exact, context // 2), context - ROWS)
        ends = [Slice(self._past(len(self.short) - 1 - i), first, context) for i in range(self.heldout)]
        facts, repeated = self._long
        amid = length // 2 - ROWS // 2
        again = min(period_of(self.repeated) + ROWS, length - 2 * ROWS)
        return [
            *ends,
            Slice(facts, length - ROWS, length),
            Slice(facts, amid, amid + ROWS),
            Slice(repeated, length - ROWS, length),
            Slice(repeated, again, again + ROWS),
        ]

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


def prune_by_slices(
    reference: SliceReference,
    count: int,
    group: Mapping[int, int],
    *,
    rounds: int,
    advance: Callable[..., None],
) -> Keep:
    """The `count` heads to keep: first by damage, then round by round the least worth of those still kept goes."""
    scores = reference.head_damage()
    for left in reversed(range(rounds + 1)):
        size = min(len(scores), round(count * SHRINK**left))
        keep = best_heads(scores, size, group)
        if not left or not count:
            break
        found, now = reference.softmax_gains(keep)
        advance(note=f"{size} heads kept, divergence {geometric_mean(now):.4f}")
        scores = {head: found[head] for head in keep}
    return keep


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
    optimizer = torch.optim.Adam(trained, lr=RATE)
    with frozen(model):
        for step, piece in enumerate(slices):
            for each in optimizer.param_groups:
                each["lr"] = RATE * pace(step, steps)
            with torch.no_grad():
                teacher = read_slice(model, mechanisms, piece, None)
            optimizer.zero_grad()
            loss = reference.loss(piece, teacher, keep)
            loss.backward()
            optimizer.step()
            advance(note=f"divergence {loss.item():.4f}")
    after = geometric_mean(reference.divergence(keep))
    with torch.no_grad():
        for p, start in zip(trained, begun, strict=True):
            p.grad = None
            if not after < before or math.isnan(after):
                p.copy_(start)
    return before, min(before, after)


def long_enough(mechanisms: Mapping[int, Mechanism], length: int, context: int) -> bool:
    """Whether slices can be had: every replacement is a hybrid whose features hold beyond the short passages."""
    able = all(isinstance(m, Hybrid) and m.reach is None for m in mechanisms.values())
    return bool(mechanisms) and able and length >= max(2 * context, 8 * ROWS)
