"""Statistics of every row of attention, streamed over blocks of queries: time grows as n^2, memory as n."""

import dataclasses

import torch
from jaxtyping import Float
from torch import Tensor

from attngap.heads.inputs import LayerInputs

BLOCK = 2**19  # logits held at a time: they stay in a core's cache
QUANTILES = (0.1, 0.5, 0.9)


@dataclasses.dataclass(frozen=True)
class Rows:
    """Per head and row, `(h, t)`. The stress scores are None unless the sequence repeats with a known period."""

    entropy: Tensor  # nats / log n; NaN for a row with one key
    top: Tensor  # the largest weight
    sink: Tensor  # mass on the first `sinks` keys
    near: Tensor  # mass on the last `window` keys that are not sinks (bidirectional: within `window` either side)
    kappa: Tensor  # selection exponent (docs/theory.md 2.1); NaN below three keys
    margin: Tensor  # M: log of the top weight over the mean of the others
    on_sink: Tensor  # 1 where the top key is a sink
    spread: Tensor  # the top logit above the mean logit
    previous: Tensor | None = None  # weight on the token before
    duplicate: Tensor | None = None  # weight on the same token, one period earlier
    induction: Tensor | None = None  # weight on the token after that: what copying needs


def measure(inputs: LayerInputs, *, window: int, sinks: int, period: int | None = None, block: int = BLOCK) -> Rows:
    """All rows of all heads. No more than `block` logits (or one row of a key head's queries) exist at a time."""
    kv_heads, t, s = inputs.k.shape[0], inputs.length, inputs.k.shape[1]
    together = kv_heads if inputs.heads * s * 32 <= block else 1
    step = max(1, min(t, block // (together * inputs.group * s)))
    out: dict[str, Tensor] = {}
    for start in range(0, t, step):
        rows = slice(start, min(start + step, t))
        for first in range(0, kv_heads, together):
            kv = slice(first, first + together)
            part = _block(inputs.logits(rows, kv), rows, inputs.causal, window, sinks, period)
            heads = slice(kv.start * inputs.group, kv.stop * inputs.group)
            for name, value in part.items():
                out.setdefault(name, inputs.q.new_zeros(inputs.heads, t))[heads, rows] = value
    return _finish(out, inputs)


def _block(
    logits: Float[Tensor, "h r s"], rows: slice, causal: bool, window: int, sinks: int, period: int | None
) -> dict[str, Float[Tensor, "h r"]]:
    """One pass each: max, shift, exp, sum, dot. The top weight is then 1 / z and costs nothing. Overwrites `logits`."""
    first = logits.amax(-1, keepdim=True)
    logits -= first
    part = {"first": first[..., 0], "on_sink": (logits[..., :sinks] >= 0).any(-1).to(logits)}
    weights = logits.exp()
    z = weights.sum(-1)
    part["log_z"] = z.log()
    part["others"] = _others(weights, z)
    part["energy"] = torch.linalg.vecdot(weights, logits) / z  # mean of logit - first; a forbidden key has weight 0
    part["sink"] = weights[..., :sinks].sum(-1) / z
    part["near"] = _near(weights, rows, causal, window, sinks) / z
    if period is not None:
        for name, back in (("previous", 1), ("duplicate", period), ("induction", period - 1)):
            part[name] = _back(weights, rows, back) / z
    return part


def _others(weights: Tensor, z: Tensor) -> Tensor:
    """z - 1, what the top key leaves; in float64 for the few rows where single precision would cancel."""
    others = z - 1
    sharp = others < 1e-3
    if sharp.any():
        others[sharp] = (weights[sharp].sum(-1, dtype=torch.float64) - 1).to(others)
    return others


def _near(weights: Tensor, rows: slice, causal: bool, window: int, sinks: int) -> Tensor:
    """Unnormalized mass within the window, sinks apart; reads a band, not the whole block."""
    low = max(sinks, rows.start - window + 1)
    high = weights.shape[-1] if causal else min(weights.shape[-1], rows.stop + window - 1)
    if low >= high:
        return torch.zeros_like(weights[..., 0])
    place = torch.arange(max(rows.stop, high), device=weights.device)
    distance = place[rows, None] - place[None, low:high]
    return (weights[..., low:high] * (distance.abs() < window)).sum(-1)


def _back(weights: Tensor, rows: slice, back: int) -> Tensor:
    """Unnormalized weight on the key `back` places earlier; zero where there is none."""
    index = torch.arange(rows.start, rows.stop, device=weights.device) - back
    index = index.expand(*weights.shape[:-1])
    there = (index >= 0) & (index < weights.shape[-1])
    found = weights.gather(-1, index.clamp(0, weights.shape[-1] - 1)[..., None])[..., 0]
    return found * there


def _finish(out: dict[str, Tensor], inputs: LayerInputs) -> Rows:
    n = inputs.readable().to(out["first"])
    top = (-out["log_z"]).exp()
    margin = (n - 1).log() - out["others"].clamp(min=torch.finfo(top.dtype).tiny).log()
    return Rows(
        entropy=torch.where(n > 1, (out["log_z"] - out["energy"]) / n.log(), torch.nan),
        top=top,
        sink=out["sink"],
        near=out["near"],
        kappa=torch.where(n > 2, margin / (n - 1).log(), torch.nan),
        margin=torch.where(n > 1, margin, torch.nan),
        on_sink=out["on_sink"],
        spread=out["first"] - inputs.mean_logits(),
        previous=out.get("previous"),
        duplicate=out.get("duplicate"),
        induction=out.get("induction"),
    )
