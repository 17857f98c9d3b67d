"""Choose the heads that keep softmax by what giving it back to each would do to the converted model as it is."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from attngap.conversion.joint import Judge, divergence, together
from attngap.mechanisms.base import Mechanism
from attngap.models.capture import Call, capture
from attngap.models.fisher import draw, frozen
from attngap.models.swap import MixedHeads, mixed_heads, swap

Head = tuple[int, int]  # layer, head
Keep = frozenset[Head]
ByLayer = dict[int, Float[Tensor, " h"]]
SHRINK = 1.7  # by how much each round makes a keep set smaller
TRADED = (0.5, 0.25, 0.1)  # shares of the wanted exchanges that are tried: all at once would overshoot


def convert(model: PreTrainedModel, mechanisms: Mapping[int, Mechanism], keep: Iterable[Head]) -> PreTrainedModel:
    """The model with every head of `mechanisms` replaced except those in `keep`; a layer all kept stays as it was."""
    kept = set(keep)
    layers = {
        layer: (mechanism, [head for head in range(mechanism.heads) if (layer, head) in kept])
        for layer, mechanism in mechanisms.items()
    }
    return swap(model, {layer: (m, heads) for layer, (m, heads) in layers.items() if len(heads) < m.heads})


def damage(
    original: PreTrainedModel, mechanisms: Mapping[int, Mechanism], judge: Judge, *, seed: int = 0
) -> dict[Head, float]:
    """What replacing each head alone would do (docs/theory.md 5.1), as a share of what all come to."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for tokens in judge.passages[:, None]:
        shares = _no_shares(mechanisms, tokens.shape[1])

        def watch(call: Call, shares: dict[int, Tensor] = shares) -> Tensor | None:
            if call.cross or call.layer not in shares:
                return None
            with torch.no_grad():
                change = call.output - mechanisms[call.layer](None, call.q, call.k, call.v, rotary=call.rotary)[1]
            return call.output + shares[call.layer][..., None] * change

        with frozen(original), torch.enable_grad(), capture(original, watch):
            out = judge.read(original, tokens)
        found.append(_information(out, shares, generator, labels=judge.labels))
    return _of_all(found)


def worth(
    original: PreTrainedModel, mechanisms: Mapping[int, Mechanism], keep: Keep, judge: Judge, *, seed: int = 0
) -> tuple[dict[Head, float], Float[Tensor, " count"]]:
    """What softmax in each head is worth to the model as converted now, and the divergence on each passage.

    Worth is the divergence without softmax minus with it. With a_h the share of softmax in head h's output,
    o = o_replaced + a_h (o_softmax - o_replaced), the divergence is expanded to second order in a_h: its slope, and the
    Fisher information of a_h from labels drawn from the model. Both are those of the converted model, so they know
    what the other replacements do to this head.
    """
    every = {layer: (m, [h for h in range(m.heads) if (layer, h) in keep]) for layer, m in mechanisms.items()}
    model = swap(original, every)
    sign = {
        layer: torch.tensor([1.0 if (layer, head) in keep else -1.0 for head in range(m.heads)])
        for layer, m in mechanisms.items()
    }
    generator = torch.Generator().manual_seed(seed)
    losses, found = [], []
    for tokens, teacher in judge.pairs():
        shares = _no_shares(mechanisms, tokens.shape[1])
        parts = mixed_heads(model)
        hooks = [parts[layer].register_forward_hook(_mix(share)) for layer, share in shares.items()]
        with frozen(model), torch.enable_grad():
            out = judge.read(model, tokens)
            loss = divergence(out, teacher, labels=judge.labels)
        for hook in hooks:
            hook.remove()
        slopes = torch.autograd.grad(loss, list(shares.values()), retain_graph=True)
        second = _information(out, shares, generator, labels=judge.labels)
        pairs = zip(shares, slopes, strict=True)
        found.append({layer: sign[layer] * second[layer] - slope.sum(-1) for layer, slope in pairs})
        losses.append(loss.detach())
    return _of_all(found), torch.stack(losses)


def _no_shares(mechanisms: Mapping[int, Mechanism], length: int) -> dict[int, Float[Tensor, "h t"]]:
    return {layer: torch.zeros(m.heads, length, requires_grad=True) for layer, m in mechanisms.items()}


def _information(
    out: Tensor, shares: dict[int, Float[Tensor, "h t"]], generator: torch.Generator, *, labels: bool
) -> ByLayer:
    """Half the second derivative of the divergence in each head's share, by layer; `out` are logits or states."""
    with torch.no_grad():
        cotangent = _fisher_direction(out.detach(), generator, labels=labels)
    grads = torch.autograd.grad(out, list(shares.values()), cotangent)
    # of independent labels at each token, so squares add up over tokens
    rows = out.shape[1]
    squares = [grad.square().sum(-1) / rows / 2 if labels else grad.sum(-1).square() for grad in grads]
    return dict(zip(shares, squares, strict=True))


def _of_all(found: list[ByLayer]) -> dict[Head, float]:
    """Mean over passages of each head's value relative to the sum of all positive ones.

    Passages are weighed alike, so that neither text nor recall drowns the other.
    """
    total: dict[Head, float] = {}
    for values in found:
        scale = sum(float(value.clamp(min=0).sum()) for value in values.values())
        for layer, value in values.items():
            for head, x in enumerate(value.tolist()):
                total[layer, head] = total.get((layer, head), 0.0) + x / max(scale, 1e-12) / len(found)
    return total


def _fisher_direction(out: Tensor, generator: torch.Generator, *, labels: bool) -> Tensor:
    """A random cotangent whose covariance is the curvature of the divergence at the model's own output."""
    if not labels:
        return torch.randn(out.shape, generator=generator) / out.square().sum().sqrt()
    odds = out.softmax(-1)
    label = draw(odds, 1, generator)
    return odds.neg_().scatter_add_(-1, label, torch.ones_like(odds[..., :1]))


def _mix(share: Float[Tensor, "h t"]) -> Callable[..., Tensor]:
    """A hook that adds share_ht (softmax - replacement) to head h's output at token t, share being zero."""

    def hook(part: MixedHeads, args: tuple, out: Tensor) -> Tensor:
        q, k, v, mask, scale, rotary = args
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
            change = exact - out
            if len(part.keep):
                change[:, part.keep] = (exact - part.mechanism(None, q, k, v, rotary=rotary)[1])[:, part.keep]
        return out + share[..., None] * change

    return hook


def best_of(scores: Mapping[Head, float], count: int, mechanisms: Mapping[int, Mechanism], *, grouped: bool) -> Keep:
    """The `count` heads worth most, or the groups worth most until no further one fits."""
    if not grouped:
        ranked = sorted(scores, key=lambda head: (-scores[head], head))
        return frozenset(ranked[:count])
    groups: dict[tuple[int, int], list[Head]] = {}
    for layer, head in sorted(scores):
        m = mechanisms[layer]
        groups.setdefault((layer, head // (m.heads // m.kv_heads)), []).append((layer, head))
    ranked_groups = sorted(groups.values(), key=lambda heads: (-sum(scores[h] for h in heads), heads))
    kept: list[Head] = []
    for heads in ranked_groups:
        if len(kept) + len(heads) <= count:
            kept += heads
    return frozenset(kept)


def prune(
    original: PreTrainedModel,
    mechanisms: Mapping[int, Mechanism],
    count: int,
    judge: Judge,
    *,
    rounds: int,
    grouped: bool,
    advance: Callable[..., None],
) -> Keep:
    """The `count` heads to keep: first by damage, then round by round the least worth of those still kept goes.

    Damage is of one head alone. What a head is worth depends on which others are replaced, so it is asked anew on the
    way, while the model is still near the original and an expansion holds.
    """
    scores = damage(original, mechanisms, judge)
    for left in reversed(range(rounds + 1)):
        size = min(len(scores), round(count * SHRINK**left))
        keep = best_of(scores, size, mechanisms, grouped=grouped)
        if not left or not count:
            break
        found, now = worth(original, mechanisms, keep, judge)
        advance(note=f"{size} heads kept, divergence {together(now):.4f}")
        scores = {head: found[head] for head in keep}
    return keep


def refine(
    original: PreTrainedModel,
    mechanisms: Mapping[int, Mechanism],
    keep: Keep,
    judge: Judge,
    *,
    rounds: int,
    grouped: bool,
    advance: Callable[..., None],
) -> Keep:
    """Trade kept heads for replaced ones worth more, as long as the measured divergence falls."""
    for _ in range(rounds):
        scores, losses = worth(original, mechanisms, keep, judge)
        now = together(losses)
        advance(note=f"divergence {now:.4f}")
        better = (
            tried
            for tried in _trades(scores, keep, mechanisms, grouped=grouped)
            if together(judge(convert(original, mechanisms, tried))) < now
        )
        found = next(better, None)
        if found is None:
            break
        keep = found
    return keep


def _trades(
    scores: Mapping[Head, float], keep: Keep, mechanisms: Mapping[int, Mechanism], *, grouped: bool
) -> Iterator[Keep]:
    """Some of the exchanges that the scores ask for, the surest first, then fewer."""
    wanted = best_of(scores, len(keep), mechanisms, grouped=grouped)
    if wanted == keep:
        return
    if grouped:
        yield wanted
        return
    enter = sorted(wanted - keep, key=lambda head: (-scores[head], head))
    leave = sorted(keep - wanted, key=lambda head: (scores[head], head))
    for some in dict.fromkeys(math.ceil(share * len(enter)) for share in TRADED):
        yield (keep - frozenset(leave[:some])) | frozenset(enter[:some])
