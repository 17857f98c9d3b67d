"""Choose the heads that keep softmax by what giving it back to each would do to the converted model as it is."""

from collections.abc import Callable, Iterable, Mapping

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from attngap.conversion.joint import divergence, outputs
from attngap.mechanisms.base import Mechanism
from attngap.models.swap import MixedHeads, mixed_heads, swap

Head = tuple[int, int]  # layer, head
Keep = frozenset[Head]


def convert(model: PreTrainedModel, mechanisms: Mapping[int, Mechanism], keep: Iterable[Head]) -> PreTrainedModel:
    """The model with every head of `mechanisms` replaced except those in `keep`; a layer all kept stays as it was."""
    kept = set(keep)
    layers = {
        layer: (mechanism, [head for head in range(mechanism.heads) if (layer, head) in kept])
        for layer, mechanism in mechanisms.items()
    }
    return swap(model, {layer: (m, heads) for layer, (m, heads) in layers.items() if len(heads) < m.heads})


def worth(
    original: PreTrainedModel,
    mechanisms: Mapping[int, Mechanism],
    keep: Keep,
    tokens: Int[Tensor, "count context"],
) -> dict[Head, float]:
    """How much the divergence would fall if a head had softmax, or rise if it lost it, to first order.

    With a_h the share of softmax in head h's output, o = o_replaced + a_h (o_softmax - o_replaced), this is
    -d divergence / d a_h in the model as converted now, so it knows what the other replacements do to this head.
    Passages are weighed alike, each relative to its own divergence: neither text nor recall drowns the other.
    """
    every = {layer: (m, [h for h in range(m.heads) if (layer, h) in keep]) for layer, m in mechanisms.items()}
    model = swap(original, every)
    labels = model.get_output_embeddings() is not None
    shares = {layer: torch.zeros(m.heads, requires_grad=True) for layer, m in mechanisms.items()}
    for layer, part in mixed_heads(model).items():
        part.register_forward_hook(_mix(shares[layer]))
    total: dict[Head, float] = dict.fromkeys(((i, h) for i, m in mechanisms.items() for h in range(m.heads)), 0.0)
    weights = [p for p in model.parameters() if p.requires_grad]
    try:
        for p in weights:
            p.requires_grad_(False)
        for passage in tokens:
            with torch.no_grad():
                teacher = outputs(original, passage[None])
            loss = divergence(outputs(model, passage[None]), teacher, labels=labels)
            grads = torch.autograd.grad(loss, list(shares.values()))
            for layer, grad in zip(shares, grads, strict=True):
                for head, slope in enumerate((-grad / loss.detach().clamp(min=1e-9)).tolist()):
                    total[layer, head] += slope / len(tokens)
    finally:
        for p in weights:
            p.requires_grad_(True)
    return total


def _mix(share: Float[Tensor, " h"]) -> Callable[..., Tensor]:
    """A hook that adds share_h (softmax - replacement) to head h's output, share being zero."""

    def hook(part: MixedHeads, args: tuple, out: Tensor) -> Tensor:
        q, k, v, mask, scale = args
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
            change = exact - part.mechanism(None, q, k, v)[1]
        return out + share[:, None, None] * change

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


@torch.no_grad()
def measure(
    original: PreTrainedModel, converted: PreTrainedModel, tokens: Int[Tensor, "count context"]
) -> Float[Tensor, " count"]:
    """The divergence on each passage."""
    labels = converted.get_output_embeddings() is not None
    return torch.stack(
        [divergence(outputs(converted, p[None]), outputs(original, p[None]), labels=labels) for p in tokens]
    )


def refine(
    original: PreTrainedModel,
    mechanisms: Mapping[int, Mechanism],
    keep: Keep,
    tokens: Int[Tensor, "count context"],
    *,
    rounds: int,
    grouped: bool,
    advance: Callable[..., None],
) -> Keep:
    """Trade kept heads for replaced ones worth more, as long as the measured divergence falls."""
    now = measure(original, convert(original, mechanisms, keep), tokens)
    for _ in range(rounds):
        scores = worth(original, mechanisms, keep, tokens)
        tried = _trade(scores, keep, mechanisms, grouped=grouped)
        advance()
        if tried == keep:
            break
        then = measure(original, convert(original, mechanisms, tried), tokens)
        # geometric mean, so that halving the damage to recall counts as much as halving that to text
        if then.clamp(min=1e-9).log().mean() >= now.clamp(min=1e-9).log().mean():
            break
        keep, now = tried, then
    return keep


def _trade(scores: Mapping[Head, float], keep: Keep, mechanisms: Mapping[int, Mechanism], *, grouped: bool) -> Keep:
    """Half of the exchanges that the scores ask for, the surest first: all at once would overshoot."""
    wanted = best_of(scores, len(keep), mechanisms, grouped=grouped)
    if grouped:
        return wanted
    enter = sorted(wanted - keep, key=lambda head: (-scores[head], head))
    leave = sorted(keep - wanted, key=lambda head: (scores[head], head))
    half = -(-len(enter) // 2)
    return (keep - frozenset(leave[:half])) | frozenset(enter[:half])
