"""The heads of one converted attention module: some keep softmax, a mechanism computes the others."""

from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from attngap.errors import AttngapError
from attngap.mechanisms.base import Mechanism
from attngap.mechanisms.calls import possible
from attngap.mechanisms.decoding import Decoder, decoder
from attngap.mechanisms.held import begin, token_step
from attngap.mechanisms.prompts import read_piece
from attngap.mechanisms.rotary import Angles
from attngap.mechanisms.variants.hybrid import Hybrid
from attngap.models.masks import readable, readable_keys, real_tokens
from attngap.models.mixed_layer import MixedLayer, forget_pending, pending, waiting
from attngap.ops.hybrid import KeptHeads
from attngap.ops.softmax.compiled import attend_into, can_attend

HALVES = (torch.bfloat16, torch.float16)


class MixedHeads(nn.Module):
    """One attention module's heads: `keep` stay softmax, `mechanism` computes the others (and is asked for all)."""

    keep: Tensor  # heads
    groups: Tensor  # key heads that some kept head reads
    place: Tensor  # where among these each head's keys are, -1 for heads that are not kept
    kept: Tensor  # 1 for heads that are, 0 for others
    states: Tensor  # key heads that some replaced head reads

    def __init__(self, layer: int, mechanism: Mechanism, keep: Iterable[int], cache: int | None = None):
        super().__init__()
        self.layer, self.cache = layer, cache
        heads = sorted(set(keep))
        group = mechanism.heads // mechanism.kv_heads
        groups = sorted({head // group for head in heads})
        self.readers = [[head for head in heads if head // group == place] for place in groups]
        self.mechanism = mechanism
        self.register_buffer("keep", torch.tensor(heads, dtype=torch.long), persistent=False)
        self.register_buffer("groups", torch.tensor(groups, dtype=torch.long), persistent=False)
        place = [groups.index(head // group) if head in heads else -1 for head in range(mechanism.heads)]
        self.register_buffer("place", torch.tensor(place, dtype=torch.long), persistent=False)
        self.register_buffer("kept", (self.place >= 0).long(), persistent=False)
        states = sorted({head // group for head in range(mechanism.heads) if head not in heads})
        self.register_buffer("states", torch.tensor(states, dtype=torch.long), persistent=False)

    def forward(
        self,
        q: Float[Tensor, "b h t d"],
        k: Float[Tensor, "b h_kv t d"],
        v: Float[Tensor, "b h_kv t dv"],
        mask: Tensor | None,
        scale: float | None,
        rotary: Angles | None = None,
    ) -> Float[Tensor, "b h t dv"]:
        cache = pending(self.layer)
        causal = self.mechanism.causal
        if cache is None and k.shape[2] != q.shape[2]:
            raise AttngapError(
                f"Replaced heads got {k.shape[2]} keys for {q.shape[2]} queries from a cache that is not theirs. "
                "Pass past_key_values=DynamicCache(config=model.config) and let the converted model fill it"
            )
        real = real_tokens(mask, q.shape[2], causal=causal)
        real = None if real is None else real.expand(len(q), -1)
        if cache is not None and self._decodes(cache, q, scale):
            return self._decode(cache, q, k, v, mask, real, rotary)
        if self._all_near(cache, q, k, v, real, scale):
            return self._softmax(cache, q, k, v, scale, rotary)
        streams = (q.to(self.dtype), k.to(self.dtype), v.to(self.dtype))
        if cache is None:
            given = {"mask": real, "rotary": rotary}
            found = read_piece(self.mechanism, *streams, **given, skipped=self.kept)
            out = (found or self.mechanism(None, *streams, **given))[0]
        else:
            out = cache.compute(self.mechanism, *streams, real, rotary, self.kept)
        out = out.to(v.dtype)
        if len(self.keep):
            keys, values = (k[:, self.groups], v[:, self.groups]) if cache is None else cache.append(k, v)
            out = self._exact(out, q, keys, values, mask, scale)
        return out

    def _all_near(
        self, cache: MixedLayer | None, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None, scale: float | None
    ) -> bool:
        """Whether one softmax serves all heads: the first tokens of sequences, none of which leaves the window."""
        mechanism = self.mechanism
        if not isinstance(mechanism, Hybrid) or real is not None:
            return False
        if q.shape[2] > mechanism.slots - (mechanism.held > 0):  # a turn comes with the token that fills all slots
            return False
        if cache is not None and (cache.state is not None or cache.past is not None):
            return False
        same = (q.shape[3] ** -0.5 if scale is None else scale) == mechanism.scale and q.dtype == self.dtype
        return same and possible() and can_attend(q, k, v, v)

    def _softmax(
        self, cache: MixedLayer | None, q: Tensor, k: Tensor, v: Tensor, scale: float | None, rotary: Angles | None
    ) -> Float[Tensor, "b h t dv"]:
        """Of all heads, kept or not."""
        mechanism, (b, h, t, _) = self.mechanism, q.shape
        assert isinstance(mechanism, Hybrid)
        out = q.new_empty(b, t, h, v.shape[3]).transpose(1, 2)
        attend_into(out, q, k, v, torch.arange(h) // (h // k.shape[1]), scale=scale)
        if cache is not None:
            cache.state = begin(mechanism, q, k, v, rotary, cache.heads)
            cache.passed(None, t)
            if self.readers:
                cache.append(k, v)
        return out

    def _exact(
        self, out: Tensor, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float | None
    ) -> Tensor:
        """`out` with softmax in the rows of kept heads."""
        causal = self.mechanism.causal
        if causal and possible() and can_attend(q, keys, values, out):
            allowed = None if mask is None else readable_keys(mask)
            if mask is None or allowed is not None:
                attend_into(out, q, keys, values, self.place, scale=scale, allowed=allowed)
                return out
        exact = [
            F.scaled_dot_product_attention(
                q[:, heads],
                # Seen by all heads that read it, not copied: a copy costs more than attention over a long cache.
                keys[:, place : place + 1].expand(-1, len(heads), -1, -1),
                values[:, place : place + 1].expand(-1, len(heads), -1, -1),
                attn_mask=mask,
                is_causal=causal and mask is None and q.shape[2] > 1,
                scale=scale,
            )
            for place, heads in enumerate(self.readers)
        ]
        return out.index_copy(1, self.keep, torch.cat(exact, 1).to(out.dtype))

    def token(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, rotary: Angles | None
    ) -> Float[Tensor, "b 1 h dv"] | None:
        """One new token of all heads by one compiled call; None where that is not to be had."""
        mechanism, cache = self._modules["mechanism"], waiting(self.layer)
        if cache is None or cache.past is not None or not isinstance(mechanism, Hybrid) or not possible():
            return None
        state = cache.state
        if state is None or (q.shape[3] ** -0.5 if scale is None else scale) != mechanism.scale:
            return None
        if mask is not None and (mask.dtype != torch.bool or mask.shape[1:3] != (1, 1)):
            return None
        single = state["S"].dtype
        if q.dtype != single:
            return self._half_token(cache, q, k, v, mask, scale, rotary) if q.dtype in HALVES else None
        found = self._decoder(cache, self.place, rotary)
        if found is None:
            return None
        out = found.token(q, k, v, rotary, mask, cache.grow() if self.readers else None)
        cache.token_taken(mechanism, q, k, rotary, None if mask is None else mask[:, 0, 0, -1].expand(len(q)))
        forget_pending()
        cache.unread = False
        return out

    def _half_token(
        self,
        cache: MixedLayer,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        scale: float | None,
        rotary: Angles | None,
    ) -> Float[Tensor, "b 1 h dv"] | None:
        """In half precision the call computes the replaced heads, in single; kept heads read their cache as it is."""
        assert cache.state is not None
        single = cache.state["S"].dtype
        angles = None if rotary is None else (rotary[0].to(single), rotary[1].to(single))
        found = self._decoder(cache, torch.full_like(self.place, -1), angles)
        if found is None:
            return None
        out = found.token(q.to(single), k.to(single), v.to(single), angles, mask, None).to(v.dtype)
        mechanism, real = self.mechanism, None if mask is None else mask[:, 0, 0, -1].expand(len(q))
        assert isinstance(mechanism, Hybrid)
        cache.token_taken(mechanism, q.to(single), k.to(single), angles, real)
        forget_pending()
        cache.unread = False
        if not self.readers:
            return out
        return self._exact(out.transpose(1, 2), q, *cache.append(k, v), mask, scale).transpose(1, 2).contiguous()

    def _decoder(self, cache: MixedLayer, place: Tensor, rotary: Angles | None) -> Decoder | None:
        """The compiled call of the cache, laid out anew where it no longer fits."""
        assert isinstance(self.mechanism, Hybrid)
        mechanism, state = cache.reads_by(self.mechanism), cache.state
        assert state is not None
        if cache.decoder is None or not cache.decoder.fits(mechanism, state, cache.count):
            cache.decoder = decoder(mechanism, state, place, cache.count, rotary, cache.heads)
        return cache.decoder

    def _decodes(self, cache: MixedLayer, q: Tensor, scale: float | None) -> bool:
        """Whether one call serves all heads: one new token, of hybrid heads and kept ones, that is not taken back."""
        mechanism = self.mechanism
        if not isinstance(mechanism, Hybrid) or q.shape[2] > 1 or torch.is_grad_enabled():
            return False
        if cache.state is None or cache.past is not None or q.dtype != self.dtype:
            return False
        return (q.shape[3] ** -0.5 if scale is None else scale) == mechanism.scale

    def _decode(
        self,
        cache: MixedLayer,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        real: Tensor | None,
        rotary: Angles | None,
    ) -> Tensor:
        assert isinstance(self.mechanism, Hybrid)
        mechanism = cache.reads_by(self.mechanism)
        assert cache.state is not None
        streams = mechanism.read(None, q, k, v, start=cache.count, mask=real, rotary=rotary)
        may = None if mask is None else readable(mask)[:, 0, 0]
        kept = KeptHeads(self.place, *cache.append(k, v), may) if self.readers else None
        out = token_step(mechanism, streams, cache.state, rotary, kept, cache.heads)
        cache.token_taken(self.mechanism, q, k, rotary, None if real is None else real[:, 0])
        cache.passed(real, 1)
        return out

    @property
    def held(self) -> Tensor | None:
        """The key heads that a cache needs a state of, None for all: a mechanism on its own has no others."""
        some = isinstance(self.mechanism, Hybrid) and 0 < len(self.states) < self.mechanism.kv_heads
        return self.states if some else None

    @property
    def dtype(self) -> torch.dtype:
        """What the mechanism computes in: its parameters' own, at least single precision."""
        return next((x.dtype for x in self.mechanism.parameters() if x.is_floating_point()), torch.float32)

    def _apply(self, fn: Any, recurse: bool = True) -> "MixedHeads":
        """A model cast to half precision keeps its replacements as they were fitted: sums over a long past need it."""

        def keep_dtype(x: Tensor) -> Tensor:
            moved = fn(x)
            if not x.is_floating_point() or x.is_meta or moved.dtype in (torch.float32, torch.float64):
                return moved
            return x.to(moved.device)

        super()._apply(keep_dtype, recurse)
        return self


def mixed_heads(model: nn.Module) -> dict[int, MixedHeads]:
    """The converted attention modules by layer."""
    found = (part for part in model.modules() if isinstance(part, MixedHeads))
    return {part.layer: part for part in sorted(found, key=lambda part: part.layer)}
