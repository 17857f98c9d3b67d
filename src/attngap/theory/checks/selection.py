"""Checks of the selection exponent: an identity of softmax rows."""

import math

import torch

from attngap.theory.selectivity import selection
from attngap.theory.statements import Statement, require

KEYS = 200


def selection_identity() -> str:
    worst = 0.0
    logits = _logits()
    for top in (1, 5):
        found = selection(logits, top=top)
        mass = logits.softmax(-1).topk(top).values.sum(-1)
        from_margin = 1 / (1 + (KEYS - top) / top * (-found.margin).exp())
        worst = max(worst, (mass - from_margin).abs().max().item())
        require(bool(((mass >= 0.5) == (found.kappa >= 1)).all()), "kappa >= 1 and mass >= 1/2 disagree")
    require(worst < 1e-12, f"identity off by {worst:.2g}")
    return f"64 rows, one and five targets: identity to {worst:.1g}"


def context_of_half_mass() -> str:
    logits = _logits()[:1] * 2
    reached = selection(logits)
    copies = (reached.n_star.item() - 1) / (KEYS - 1)  # how often the competitors may be repeated
    order = logits.sort(-1, descending=True).values
    shares = []
    for times in (math.floor(copies), math.floor(copies) + 1):
        longer = torch.cat([order[:, :1], order[:, 1:].repeat(1, times)], -1)
        shares.append(longer.softmax(-1)[0, 0].item())
    require(shares[0] >= 0.5 > shares[1], f"mass before and after n*: {shares}")
    bounded = selection(_logits().clamp(-1.5, 1.5)).n_star.max().item()
    require(bounded <= 1 + math.exp(3.0), f"logits within 1.5 reach n* = {bounded}")
    return (
        f"with its competitors repeated a row holds {shares[0]:.4f} just before n* and {shares[1]:.4f} after; "
        f"logits within 1.5 give n* = {bounded:.1f} <= 1 + e^3"
    )


def _logits() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(64, KEYS, generator=generator, dtype=torch.float64) * 4


SELECTION = (
    Statement("2.1", "w_top = 1 / (1 + (n-1) e^(-M)), so a row selects iff kappa >= 1", selection_identity),
    Statement("2.2", "a row selects up to n* = 1 + e^M keys if further competitors are alike", context_of_half_mass),
)
