"""Choose the heads that keep softmax by what giving it back to each would do to the converted model as it is."""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from attngap.conversion.joint import Reference, divergence, geometric_mean
from attngap.heads.choice import HeadIndex, Keep, best_heads
from attngap.heads.damage import frozen, projections
from attngap.mechanisms.base import Mechanism
from attngap.models.capture import Call
from attngap.models.mixed import MixedHeads, mixed_heads
from attngap.models.placement import device_of
from attngap.models.swap import swap

ByLayer = dict[int, Float[Tensor, " h"]]
SHRINK = 1.7  # by how much each round makes a keep set smaller
TRADED = (0.5, 0.25, 0.1)  # shares of the wanted exchanges that are tried: all at once would overshoot


def convert(model: PreTrainedModel, mechanisms: Mapping[int, Mechanism], keep: Iterable[HeadIndex]) -> PreTrainedModel:
    """The model with every head of `mechanisms` replaced except those in `keep`; a layer all kept stays as it was."""
    kept = set(keep)
    layers = {
        layer: (mechanism, [head for head in range(mechanism.heads) if (layer, head) in kept])
        for layer, mechanism in mechanisms.items()
    }
    return swap(model, {layer: (m, heads) for layer, (m, heads) in layers.items() if len(heads) < m.heads})


@runtime_checkable
class Judge(Protocol):
    """What choosing asks: `SliceReference` answers on slices of long passages, `PassageJudge` on whole short ones."""

    def head_damage(self) -> dict[HeadIndex, float]:
        """What replacing each head alone would do (docs/theory.md 5.1), as a share of what all come to."""
        ...

    def softmax_gains(
        self, keep: Keep, among: Keep | None = None
    ) -> tuple[dict[HeadIndex, float], Float[Tensor, " count"]]:
        """What softmax in each head gains the model as converted now, and the divergence on each passage.

        The gain is the divergence without softmax minus with it. With a_h the share of softmax in head h's output,
        o = o_replaced + a_h (o_softmax - o_replaced), the divergence is expanded to second order in a_h: its slope, and
        the Fisher information of a_h from labels drawn from the model. Both are those of the converted model, so they
        know what the other replacements do to this head. Only heads `among` some need an answer.
        """
        ...

    def divergence(self, keep: Keep) -> Float[Tensor, " count"]:
        """On each passage, with these heads kept."""
        ...


class PassageJudge:
    """Judges by whole passages of a reference."""

    def __init__(self, original: PreTrainedModel, mechanisms: Mapping[int, Mechanism], reference: Reference):
        self.original, self.mechanisms, self.reference = original, mechanisms, reference

    def head_damage(self, *, seed: int = 0) -> dict[HeadIndex, float]:
        generator = torch.Generator().manual_seed(seed)

        def change(call: Call) -> Tensor | None:
            if call.layer not in self.mechanisms:
                return None
            with torch.no_grad():
                read = self.mechanisms[call.layer](None, call.q, call.k, call.v, rotary=call.rotary)
                return (call.output - read[0])[0]

        found = []
        for tokens in self.reference.passages[:, None]:
            read = functools.partial(self.reference.outputs, self.original, tokens)
            projected = projections(self.original, read, change, self.reference.directions, generator)
            found.append(_by_head({layer: self.reference.information(each[0]) for layer, each in projected.items()}))
        return of_all(found)

    def softmax_gains(
        self, keep: Keep, among: Keep | None = None, *, seed: int = 0
    ) -> tuple[dict[HeadIndex, float], Float[Tensor, " count"]]:
        reference, mechanisms = self.reference, self.mechanisms
        every = {layer: (m, [h for h in range(m.heads) if (layer, h) in keep]) for layer, m in mechanisms.items()}
        model = swap(self.original, every)
        sign = {
            layer: torch.tensor([1.0 if (layer, h) in keep else -1.0 for h in range(m.heads)], device=device_of(m))
            for layer, m in mechanisms.items()
        }
        generator = torch.Generator().manual_seed(seed)
        losses, found = [], []
        for tokens, teacher in reference.pairs():
            shares = _no_shares(mechanisms, tokens.shape[1])
            parts = mixed_heads(model)
            hooks = [parts[layer].register_forward_hook(_mix(share)) for layer, share in shares.items()]
            with frozen(model), torch.enable_grad():
                out = reference.outputs(model, tokens)
                loss = divergence(out, teacher, is_language_model=reference.is_language_model)
            for hook in hooks:
                hook.remove()
            slopes = torch.autograd.grad(loss, list(shares.values()), retain_graph=True)
            second = _information(out, shares, reference, generator)
            pairs = zip(shares, slopes, strict=True)
            found.append(_by_head({layer: sign[layer] * second[layer] - slope.sum(-1) for layer, slope in pairs}))
            losses.append(loss.detach())
        return of_all(found), torch.stack(losses)

    def divergence(self, keep: Keep) -> Float[Tensor, " count"]:
        return self.reference.divergence(convert(self.original, self.mechanisms, keep))


def _by_head(values: ByLayer) -> dict[HeadIndex, float]:
    return {(layer, head): x for layer, value in values.items() for head, x in enumerate(value.tolist())}


def _no_shares(mechanisms: Mapping[int, Mechanism], length: int) -> dict[int, Float[Tensor, "h t"]]:
    return {
        layer: torch.zeros(m.heads, length, requires_grad=True, device=device_of(m)) for layer, m in mechanisms.items()
    }


def _information(
    out: Tensor, shares: dict[int, Float[Tensor, "h t"]], reference: Reference, generator: torch.Generator
) -> ByLayer:
    """Half the second derivative of the divergence in each head's share, by layer; `out` are logits or states."""
    (direction,) = reference.directions(out.detach(), generator)
    grads = torch.autograd.grad(out, list(shares.values()), direction)
    return {layer: reference.information(grad) for layer, grad in zip(shares, grads, strict=True)}


def of_all(found: Iterable[Mapping[HeadIndex, float]]) -> dict[HeadIndex, float]:
    """Mean over passages of each head's value relative to the sum of all positive ones.

    Passages are weighed alike, so that neither text nor recall drowns the other.
    """
    found = list(found)
    total: dict[HeadIndex, float] = {}
    for values in found:
        scale = max(sum(max(x, 0.0) for x in values.values()), 1e-12)
        for head, x in values.items():
            total[head] = total.get(head, 0.0) + x / scale / len(found)
    return total


def _mix(share: Float[Tensor, "h t"]) -> Callable[..., Tensor]:
    """A hook that adds share_ht (softmax - replacement) to head h's output at token t, share being zero."""

    def hook(part: MixedHeads, args: tuple, out: Tensor) -> Tensor:
        q, k, v, mask, scale, rotary = args
        q, k, v = (x.to(part.dtype) for x in (q, k, v))  # a model of half precision has replacements of single
        with torch.no_grad():
            group = q.shape[1] // k.shape[1]
            exact = F.scaled_dot_product_attention(
                q,
                k.repeat_interleave(group, 1),
                v.repeat_interleave(group, 1),
                attn_mask=mask,
                is_causal=part.mechanism.causal and mask is None,
                scale=scale,
            )
            change = exact - out.to(exact.dtype)
            if len(part.keep):
                change[:, part.keep] = (exact - part.mechanism(None, q, k, v, rotary=rotary)[0])[:, part.keep]
        return (out + share[..., None] * change).to(out.dtype)

    return hook


def group_sizes(mechanisms: Mapping[int, Mechanism], *, grouped: bool) -> dict[int, int]:
    """Heads by layer that stay or go together: those that share a key head, or each on its own."""
    return {layer: m.heads // m.kv_heads if grouped else 1 for layer, m in mechanisms.items()}


def prune(judge: Judge, count: int, group: Mapping[int, int], *, rounds: int, advance: Callable[..., None]) -> Keep:
    """The `count` heads to keep: first by damage, then round by round the least worth of those still kept goes.

    Damage is of one head alone. What a head is worth depends on which others are replaced, so it is asked anew on the
    way, while the model is still near the original and an expansion holds.
    """
    scores = judge.head_damage()
    for left in reversed(range(rounds + 1)):
        size = min(len(scores), round(count * SHRINK**left))
        keep = best_heads(scores, size, group)
        if not left or not keep:  # few heads may be fewer than a group
            break
        found, now = judge.softmax_gains(keep, keep)
        advance(note=f"{size} heads kept, divergence {geometric_mean(now):.4f}")
        scores = {head: found[head] for head in keep}
    return keep


def refine(judge: Judge, keep: Keep, group: Mapping[int, int], *, rounds: int, advance: Callable[..., None]) -> Keep:
    """Trade kept heads for replaced ones worth more, as long as the measured divergence falls."""
    for _ in range(rounds):
        scores, losses = judge.softmax_gains(keep)
        now = geometric_mean(losses)
        advance(note=f"divergence {now:.4f}")
        better = (tried for tried in _trades(scores, keep, group) if geometric_mean(judge.divergence(tried)) < now)
        found = next(better, None)
        if found is None:
            break
        keep = found
    return keep


def _trades(scores: Mapping[HeadIndex, float], keep: Keep, group: Mapping[int, int]) -> Iterator[Keep]:
    """Some of the exchanges that the scores ask for, the surest first, then fewer."""
    wanted = best_heads(scores, len(keep), group)
    if wanted == keep:
        return
    if any(size > 1 for size in group.values()):
        yield wanted
        return
    enter = sorted(wanted - keep, key=lambda head: (-scores[head], head))
    leave = sorted(keep - wanted, key=lambda head: (scores[head], head))
    for some in dict.fromkeys(math.ceil(share * len(enter)) for share in TRADED):
        yield (keep - frozenset(leave[:some])) | frozenset(enter[:some])
