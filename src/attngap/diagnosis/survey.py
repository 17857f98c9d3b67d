"""Statistics of every head on one passage, reduced to what a report needs."""

import math

import torch
from torch import Tensor

from attngap.diagnosis.statistics import Rows, measure
from attngap.heads.inputs import LayerInputs

MEANS = ("entropy", "top", "sink", "near", "on_sink", "spread")
SCORES = ("previous", "duplicate", "induction")


def survey(inputs: LayerInputs, *, window: int, sinks: int, period: int | None = None) -> dict[str, Tensor]:
    """Means over rows, every row's selection exponent (NaN where the top key is a sink), and the size of entries."""
    rows = measure(inputs, window=window, sinks=sinks, period=period)
    out = {name: getattr(rows, name).nanmean(-1) for name in MEANS}
    out["kappa"] = torch.where(rows.on_sink > 0, torch.nan, rows.kappa)
    out["length"] = torch.tensor(inputs.k.shape[1])
    out["entry"] = entry_size(inputs)
    out["linear"] = torch.tensor([head in inputs.linear for head in range(inputs.heads)])
    if period is not None:
        second = slice(inputs.length - period, None)  # only the second copy has something to find
        out |= {name: _score(rows, name)[:, second].mean(-1) for name in SCORES}
    return out


def entry_size(inputs: LayerInputs) -> Tensor:
    """B / sqrt(log n), B the largest entry when logits are written q.k / d with q and k alike in size.

    Above about one, no fast algorithm approximates the attention matrix entrywise (arXiv 2302.13214).
    """
    d, n = inputs.q.shape[-1], inputs.k.shape[1]
    q = inputs.q.abs().amax((-2, -1))
    k = inputs.k.abs().amax((-2, -1)).repeat_interleave(inputs.group)
    size = (d * q * k).sqrt() / math.log(n) ** 0.5
    size[list(inputs.linear)] = torch.nan
    return size


def _score(rows: Rows, name: str) -> Tensor:
    value = getattr(rows, name)
    assert value is not None, name
    return value


def summary(pieces: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Over the passages: means of means, quantiles of the rows' selection exponents, the largest entry."""
    out = {name: torch.stack([piece[name] for piece in pieces]).mean(0) for name in MEANS}
    out["far"] = (1 - out["sink"] - out["near"]).clamp(min=0)
    kappa = torch.cat([piece["kappa"] for piece in pieces], -1)
    for name, level in (("kappa_p10", 0.1), ("kappa", 0.5), ("kappa_p90", 0.9)):
        out[name] = kappa.nanquantile(level, -1)
    known = ~kappa.isnan()
    out["selecting"] = (kappa >= 1).sum(-1) / known.sum(-1)  # NaN where every row looks at a sink
    # Of the same median row as kappa, so that n* reaches the context exactly when kappa reaches 1.
    out["n_star"] = 1 + (pieces[0]["length"].double() - 1) ** out["kappa"].double()
    out["logit_ratio"] = torch.stack([piece["entry"] for piece in pieces]).amax(0)
    return out
