"""Which tokens of a prompt a replaced head would miss most, asked of the queries at the prompt's end."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attngap.mechanisms.far_rows import TINY
from attngap.mechanisms.rotary import Angles
from attngap.mechanisms.variants.hybrid import Hybrid

ROWS = 64  # last queries of a prompt


@torch.no_grad()
def most_missed(
    mechanism: Hybrid,
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h_kv t d"],
    v: Float[Tensor, "b h_kv t dv"],
    rotary: Angles | None,
    count: int,
) -> Int[Tensor, "b h_kv m"]:
    """For each key head `count` tokens between sinks and window, or all of them where they are fewer, in order.

    `q` are the last queries of whole unpadded prompts; `rotary` turned all of their keys. A token counts by the squared
    error of its weight in the mechanism, summed over these queries and the heads of the group, times the squared size
    of its value: features hold what many keys have in common, and get wrong the single keys that a query looks for.
    """
    t, first, last = k.shape[2], mechanism.sinks, k.shape[2] - mechanism.window
    count, kv = min(count, max(0, last - first)), mechanism.kv_heads
    if not count:
        return torch.zeros(*k.shape[:2], 0, dtype=torch.long, device=k.device)
    keys = torch.arange(t, device=k.device)
    q, rows = q[:, :, -ROWS:], keys[-min(ROWS, q.shape[2]) :, None]
    content_q, content_k = q, k
    if mechanism.rotary is not None and rotary is not None:
        ends = rotary[0][:, rows[0] :], rotary[1][:, rows[0] :]
        content_q, content_k = mechanism.rotary.unrotate(q, ends), mechanism.rotary.unrotate(k, rotary)
    fq = mechanism.feature_map.query(content_q, rows.T).unflatten(1, (kv, -1))
    fk = mechanism.feature_map.key(content_k, keys[None])
    gain = mechanism.gain_of(content_q)[..., None]
    if mechanism.reach is not None:
        gain = gain.masked_fill(rows >= mechanism.reach, -torch.inf)
    gain = gain.unflatten(1, (kv, -1))  # (b, h_kv, group, n, 1)
    q, past = q.unflatten(1, (kv, -1)), keys <= rows  # (b, h_kv, group, n, d)
    near = past & ((keys < first) | (keys > rows - mechanism.window))
    found = []
    for place in range(kv):  # one at a time: so many rows of a long prompt are large
        logits = (q[:, place] @ k[:, place, None].mT * mechanism.scale).masked_fill(~past, -torch.inf)
        lift = gain[:, place]
        if mechanism.relative:
            lift = lift + logits.masked_fill(~near, -torch.inf).amax(-1, keepdim=True)
        far = lift + (fq[:, place] @ fk[:, place, None].mT).clamp(min=TINY).log()
        made = torch.where(near, logits, far.masked_fill(~past, -torch.inf)).softmax(-1)
        missed = (logits.softmax(-1) - made).square().sum((1, 2)) * v[:, place].square().sum(-1)  # (b, t)
        found.append(missed[:, first:last].topk(count, -1).indices.sort(-1).values + first)
    return torch.stack(found, 1)
