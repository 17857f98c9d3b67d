"""The compiled calls of converted models between forbidden pages: pieces of prompts, tokens with kept heads, softmax.

Parameters, state, cache, angles and masks lie there as well as queries, keys and values; see `fences`.
"""

import copy
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attngap import mechanism
from attngap.mechanisms.decoding import decoder
from attngap.mechanisms.held import hold
from attngap.mechanisms.prompts import read_piece
from attngap.mechanisms.rotary import every_layout
from attngap.mechanisms.variants.hybrid import Hybrid
from attngap.ops.hybrid import empty_state
from attngap.ops.softmax.compiled import attend_into
from tests.trust.fences import Fences
from tests.trust.outcome import Outcome

PLACES = 512  # more than a sequence below places tensors
_fences: list[Fences] = []


class Sequence:
    """A random mechanism and what comes in: pieces of a prompt, then tokens one at a time."""

    def __init__(self, draw: random.Random, pieces: int = 2, tokens: int = 8):
        self.rand = torch.Generator().manual_seed(draw.randrange(2**32))
        self.dtype = draw.choice((torch.float32, torch.float32, torch.float64))
        self.b, kv, share = draw.randint(1, 2), draw.randint(1, 2), draw.randint(1, 3)
        h, d, dv = kv * share, draw.choice((4, 8, 12, 16, 18, 32, 34)), draw.choice((1, 5, 8, 16, 19))
        layout = draw.choice((None, *every_layout()))
        pairs = draw.randint(1, d // 2)  # of channels that turn
        self.width = pairs if layout is not None and layout.angles == "once" else 2 * pairs
        self.mechanism = self._mechanism(draw, h, kv, d, dv, layout)
        self.place = torch.tensor([place for group in range(kv) for place in self._places(draw, group, share)])
        self.shapes = ((h, d), (kv, d), (kv, dv))
        sizes = [draw.choice((2, 3, 15, 16, 17, 40)) for _ in range(pieces)] + [1] * tokens
        self.inputs = [self._inputs(t) for t in sizes]
        real = torch.rand(self.b, sum(sizes), generator=self.rand) < 0.8
        self.masks = None if draw.random() < 0.5 else real
        self.as_held = draw.random() < 0.7  # the state of tokens, as caches hold it
        some = [group for group in range(kv) if (self.place.unflatten(0, (kv, -1))[group] < 0).any()]
        self.heads = torch.tensor(some) if 0 < len(some) < kv else None

    def _mechanism(self, draw: random.Random, h: int, kv: int, d: int, dv: int, layout) -> Hybrid:
        options: dict[str, Any] = {"window": draw.randint(1, 24), "sinks": draw.randint(0, 4)}
        options |= {"relative": draw.random() < 0.5, "gain": draw.choice(("none", "head", "query"))}
        options |= {"reach": draw.choice((None, 20)), "feature_map": "prototype"}
        options["map_options"] = {"features": draw.choice((1, 2, 8, 15, 16, 17, 33)), "decay": draw.random() < 0.5}
        if layout is not None:
            options["rotary"] = {name: getattr(layout, name) for name in ("pairs", "angles", "place")}
        made = mechanism("hybrid", h, d, dv, kv_heads=kv, **options)
        assert isinstance(made, Hybrid)
        for weight in made.requires_grad_(False).parameters():
            weight.add_(0.3 * torch.randn(weight.shape, generator=self.rand))
        return made.to(self.dtype)

    def _places(self, draw: random.Random, group: int, share: int) -> list[int]:
        return [draw.choice((-1, group)) for _ in range(share)]

    def _some(self, held: dict[str, Tensor]) -> dict[str, Tensor]:
        return held | {name: held[name][:, self.heads] for name in ("k", "v", "S", "z")}

    def _inputs(self, t: int) -> tuple[Tensor, ...]:
        turned = 6 * torch.rand(self.b, t, self.width, generator=self.rand, dtype=self.dtype)
        found = [torch.randn(self.b, h, t, w, generator=self.rand, dtype=self.dtype) for h, w in self.shapes]
        return *found, turned.cos(), turned.sin()

    def run(self, put: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """All outputs and the last state and cache, from tensors that `put` has placed."""
        made, place = copy.deepcopy(self.mechanism), put(self.place)
        for weight in made.parameters():
            weight.data = put(weight.data)
        features = torch.empty(()).to(self.dtype).expand(self.b, self.shapes[1][0], 1, made.feature_map.width)
        k, v = self.inputs[0][1:3]
        state = {name: put(x) for name, x in empty_state(k, v, features, made.window, made.sinks).items()}
        count, at, outs, call = put(torch.zeros(self.b, dtype=torch.long)), 0, [], None
        length = sum(x[0].shape[2] for x in self.inputs)
        keys, values = (put(x.new_zeros(*x.shape[:2], length, x.shape[3])) for x in (k, v))
        skipped, held = put((self.place >= 0).long()), None
        for each in self.inputs:
            q, k, v, cos, sin = (put(x) for x in each)
            t, rotary = q.shape[2], None if made.rotary is None else (cos, sin)
            real = None if self.masks is None else put(self.masks[:, at : at + t].contiguous())
            at += t
            if t > 1:
                given = {"state": state, "start": count, "mask": real, "rotary": rotary, "skipped": skipped}
                found = read_piece(made, q, k, v, **given)
                assert found is not None
                out, state = found
                out = out[:, self.place < 0]  # rows of the others hold anything
                held = hold(made, state, rotary, before=held, real=real)
                count += t if real is None else real.sum(1)
                keys[:, :, at - t : at], values[:, :, at - t : at] = k, v
            else:
                if call is None and self.as_held and held is not None:
                    state = held if self.heads is None else self._some(held)
                    state = {name: put(x.contiguous()) for name, x in state.items()}
                heads = self.heads if self.as_held else None
                call = call or decoder(made, state, place, count, rotary, heads)
                assert call is not None
                assert call.fits(made, state, count)
                seen = None if self.masks is None else put(self.masks[:, None, None, :at].contiguous())
                out = call.token(q, k, v, rotary, seen, (keys, values, at))
            outs.append(out.clone())
        return [*outs, *(x.clone() for x in state.values()), keys.clone(), values.clone(), count.clone()]


class Exact:
    """Softmax of some heads over a cache."""

    def __init__(self, draw: random.Random):
        rand = torch.Generator().manual_seed(draw.randrange(2**32))
        dtype = draw.choice((torch.float32, torch.float32, torch.float64))
        b, h, groups, t = draw.randint(1, 2), draw.randint(1, 5), draw.randint(1, 3), draw.choice((1, 2, 17, 64, 70))
        n, d, dv = t + draw.choice((0, 1, 15, 40)), draw.choice((1, 3, 8, 16, 17, 33)), draw.choice((1, 5, 8, 16, 19))
        sizes = (b, h, t, d), (b, groups, n, d), (b, groups, n, dv)
        self.tensors = [torch.randn(size, generator=rand, dtype=dtype) for size in sizes]
        self.place = torch.tensor([draw.randrange(-1, groups) for _ in range(h)])
        self.allowed = None if draw.random() < 0.5 else torch.rand(b, n, generator=rand) < 0.7

    def run(self, put: Callable[[Tensor], Tensor]) -> list[Tensor]:
        q, keys, values = (put(x) for x in self.tensors)
        out = put(q.new_zeros(*q.shape[:3], values.shape[3]))
        attend_into(out, q, keys, values, put(self.place), allowed=None if self.allowed is None else put(self.allowed))
        return [out.clone()]


KINDS: dict[str, Callable[[random.Random], Any]] = {"prompt and tokens of a layer": Sequence, "kept heads": Exact}


@torch.no_grad()
def batch(number: int, calls: int = 20) -> Outcome:
    """Layers of converted models in ordinary memory and between forbidden pages."""
    if not _fences:
        _fences.append(Fences(PLACES))
    fences, outcome, draw = _fences[0], Outcome(), random.Random(f"calls {number}")
    for i in range(calls):
        name = list(KINDS)[i % len(KINDS)]
        case = KINDS[name](draw)
        fences.at_end = draw.random() < 0.7
        plain = case.run(torch.clone)
        with fences.results():
            fenced = case.run(fences.place)
        outcome.count(name)
        if not all(torch.equal(one, other) for one, other in zip(plain, fenced, strict=True)):
            outcome.faults.append(f"{name}, case {i} of batch {number}: another result between forbidden pages")
    return outcome
