"""The inputs of one layer's heads on one sequence, without padding: what every measurement of a head reads."""

import dataclasses
from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attngap.mechanisms.rotary import Angles
from attngap.models.capture import Call
from attngap.models.masks import readable
from attngap.models.positions import Positions, positions_of

# Below every logit yet finite: exp gives 0 and 0 * FORBIDDEN stays 0, where -inf would give NaN.
FORBIDDEN = -1e30


@dataclasses.dataclass(frozen=True)
class LayerInputs:
    """Queries, keys and values of one unpadded sequence; q is scaled already, so that logits are q.k + bias."""

    q: Float[Tensor, "h t d"]
    k: Float[Tensor, "kv s d"]
    v: Float[Tensor, "kv s dv"]
    causal: bool
    allowed: Bool[Tensor, "t s"] | None = None  # a sliding window, say; None when `causal` says it all
    bias: Float[Tensor, "h t s"] | None = None
    linear: tuple[int, ...] = ()  # heads that are linear already: these queries and keys do not say what they read
    mixing: Float[Tensor, "l t s"] | None = None  # logarithms of those heads' weights, set by the diagnosis
    rotary: Angles | None = None  # cos and sin, (1, t, w), that q and k were turned by
    positions: Positions | None = None  # how q and k know theirs, where `layer_positions` was asked

    @property
    def heads(self) -> int:
        return self.q.shape[0]

    @property
    def kv_heads(self) -> int:
        return self.k.shape[0]

    @property
    def dim(self) -> int:
        return self.q.shape[2]

    @property
    def value_dim(self) -> int:
        return self.v.shape[2]

    @property
    def scale(self) -> float:
        """Of a mechanism that is given `streams`: the model's own scale is in q."""
        return self.dim**-0.5

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.q.shape[0] // self.k.shape[0]

    @property
    def length(self) -> int:
        return self.q.shape[1]

    @property
    def replaceable(self) -> bool:
        """Whether a mechanism can be fitted to it: softmax heads, no bias, no mask but the causal one.

        Whether it could also be put into the model is for `attngap.models.shapes` to say.
        """
        return self.bias is None and self.allowed is None and len(self.linear) < self.heads

    def keys(self, rows: slice) -> int:
        """How many keys the rows can reach: the causal triangle's unread half is never computed."""
        return min(rows.stop, self.k.shape[1]) if self.causal else self.k.shape[1]

    def logits(self, rows: slice, kv: slice) -> Float[Tensor, "heads r s"]:
        """Logits of some rows of some key heads' queries; FORBIDDEN where a row may not read."""
        reach = self.keys(rows)
        kv_heads, group, count = kv.stop - kv.start, self.group, rows.stop - rows.start
        q = self.q[kv.start * group : kv.stop * group, rows].reshape(kv_heads, group * count, -1)
        logits = torch.bmm(q, self.k[kv, :reach].mT).view(kv_heads * group, count, reach)
        if self.bias is not None:
            logits += self.bias[kv.start * group : kv.stop * group, rows, :reach]
        if self.allowed is not None:
            logits.masked_fill_(~self.allowed[rows, :reach], FORBIDDEN)
        elif self.causal:
            ahead = torch.ones(count, count, dtype=torch.bool, device=q.device).triu(1)
            logits[..., rows.start :].masked_fill_(ahead[:, : reach - rows.start], FORBIDDEN)
        if self.mixing is not None:
            for head, known in zip(self.linear, self.mixing, strict=True):
                if kv.start * group <= head < kv.stop * group:
                    logits[head - kv.start * group] = known[rows, :reach]
        return logits

    def weights(self, kv: slice | None = None) -> Float[Tensor, "heads t s"]:
        """The whole matrix; for one layer at a time."""
        kv = kv or slice(0, self.k.shape[0])
        out = self.q.new_zeros((kv.stop - kv.start) * self.group, self.length, self.k.shape[1])
        step = max(1, 2**19 // (out.shape[0] * out.shape[2]))
        for start in range(0, self.length, step):
            rows = slice(start, min(start + step, self.length))
            logits = self.logits(rows, kv)
            out[:, rows, : logits.shape[-1]] = torch.softmax(logits, -1)
        return out

    def readable(self) -> Int[Tensor, "t"]:
        """n: the number of keys each row may read."""
        if self.allowed is not None:
            return self.allowed.sum(-1)
        t, s = self.length, self.k.shape[1]
        return torch.arange(1, t + 1, device=self.k.device) if self.causal else self.k.new_full((t,), s).long()

    def mean_logits(self) -> Float[Tensor, "h t"]:
        """The mean logit of each row over the keys it may read, from sums of keys: no n x n logits."""
        n = self.readable()[:, None].to(self.k)
        if self.allowed is not None:
            sums = torch.cat([rows.to(self.k) @ self.k for rows in self.allowed.split(512)], 1)  # (kv, t, d)
        elif self.causal:
            sums = self.k.cumsum(1)
        else:
            sums = self.k.sum(1, keepdim=True).expand(-1, self.length, -1)
        mean = (sums / n).repeat_interleave(self.group, 0)
        out = (self.q * mean).sum(-1)
        if self.bias is not None:
            allowed = self.allowed if self.allowed is not None else self._plain()
            out = out + (self.bias * allowed).sum(-1) / n[:, 0]
        out[list(self.linear)] = torch.nan  # their logits are none of q and k
        return out

    def _plain(self) -> Bool[Tensor, "t s"]:
        every = torch.ones(self.length, self.k.shape[1], dtype=torch.bool, device=self.k.device)
        return every.tril() if self.causal else every


def layer_inputs(call: Call) -> Iterator[LayerInputs]:
    """Each sequence of the batch with its padding taken out.

    A token is real when it may read itself; in cross-attention every query is, and a key is real when any row reads it.
    """
    for i in range(call.q.shape[0]):
        q, k, v = call.q[i] * call.scale, call.k[i], call.v[i]
        bias = None if call.bias is None else call.bias[min(i, call.bias.shape[0] - 1)]
        allowed = _allowed(call, i)
        if allowed is None:
            yield LayerInputs(q, k, v, call.causal, None, bias, call.linear, None, *_turned(call, i, None))
            continue
        keys = allowed.any(0) if call.cross else allowed.diagonal()
        rows = torch.ones_like(allowed[:, 0]) if call.cross else keys
        if not (keys.all() and rows.all()):
            q, k, v, allowed = q[:, rows], k[:, keys], v[:, keys], allowed[rows][:, keys]
            bias = None if bias is None else bias[:, rows][:, :, keys]
        causal = not call.cross and not bool(allowed.triu(1).any())
        full = bool((allowed | allowed.new_ones(allowed.shape).triu(1)).all()) if causal else bool(allowed.all())
        turned = _turned(call, i, rows)
        yield LayerInputs(q, k, v, causal, None if full else allowed, bias, call.linear, None, *turned)


def _turned(call: Call, i: int, rows: Tensor | None) -> tuple[Angles | None, Positions | None]:
    """Cos and sin of the real tokens of sequence i, and how they are used."""
    if call.rotary is None or call.cross:
        return None, positions_of(call.module)
    cos, sin = (x[min(i, len(x) - 1)][None] for x in call.rotary)
    return (cos, sin) if rows is None else (cos[:, rows], sin[:, rows]), positions_of(call.module)


def _allowed(call: Call, i: int) -> Bool[Tensor, "t s"] | None:
    if call.mask is None:
        return None
    mask = call.mask[min(i, call.mask.shape[0] - 1), 0]
    return readable(mask)
