"""Softmax weights beside those of any mechanism, on the same queries and keys."""

import base64
from typing import Any

import torch
from torch import Tensor

from attngap.errors import AttngapError, unknown
from attngap.mechanisms.base import Mechanism
from attngap.mechanisms.catalogue import mechanism, mechanism_class

DIM = 16
SHARPEST, LARGEST_SEED = 1000, 2**32 - 1
DATA = ("random", "needle", "repeat")


def answer(*, name: str, tokens: int, sharpness: float, data: str, seed: int) -> dict[str, Any]:
    """Both weight matrices and how far apart their rows are, in total variation."""
    if not 2 <= tokens <= 128:
        raise AttngapError(f"tokens must be 2 to 128, got {tokens}")
    if not (0 <= sharpness <= SHARPEST and 0 <= seed <= LARGEST_SEED):
        raise AttngapError(f"sharpness must be 0 to {SHARPEST} and seed 0 to {LARGEST_SEED}")
    q, k = queries_and_keys(tokens, sharpness, data, seed)
    mixer = build(name, seed)
    exact, other = weights_of(build("softmax", seed), q, k, seed), weights_of(mixer, q, k, seed)
    return {
        "softmax": picture(exact),
        "mechanism": picture(other),
        "distance": 0.5 * (exact - other).abs().sum(-1).mean().item(),
        "top_softmax": exact.amax(-1).mean().item(),
        "top_mechanism": other.amax(-1).mean().item(),
        "normalized": mixer.normalized,
        "untrained": mixer.learned,
    }


def queries_and_keys(tokens: int, sharpness: float, data: str, seed: int) -> tuple[Tensor, Tensor]:
    """(1, 1, t, d) each. "needle": the last half of the queries look for one key; "repeat": the second half of the
    sequence repeats the first, and each query looks for the key after its own earlier occurrence (induction)."""
    if data not in DATA:
        raise unknown("data", data, DATA)
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, tokens, DIM, generator=generator, dtype=torch.float64)
    half = tokens // 2
    if data == "needle":
        q[half:] = k[half // 2] + 0.3 * q[half:]
    elif data == "repeat":
        q[half:] = k[1 : 1 + tokens - half] + 0.3 * q[half:]
    return (sharpness * q)[None, None], k[None, None]


def build(name: str, seed: int) -> Mechanism:
    """The mechanism as it starts: nothing is trained here."""
    options: dict[str, Any] = {"window": 8} if name == "hybrid" else {}  # its usual 64 would cover everything shown
    if mechanism_class(name).gated:
        options["model_dim"] = DIM
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return mechanism(name, heads=1, dim=DIM, **options).double()


def weights_of(mixer: Mechanism, q: Tensor, k: Tensor, seed: int) -> Tensor:
    """(t, t); gates, where there are any, read a random layer input."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, q.shape[2], DIM, generator=generator, dtype=q.dtype)
    with torch.no_grad():
        return mixer.weights(mixer.read(x, q, k, torch.zeros_like(k)))[0, 0]


def picture(weights: Tensor) -> dict[str, Any]:
    """Square roots of |weights| as bytes, against the largest: what the page draws."""
    size = weights.abs()
    top = max(size.max().item(), 1e-12)
    roots = ((size / top).sqrt() * 255).round().to(torch.uint8)
    return {"roots": base64.b64encode(roots.numpy().tobytes()).decode(), "side": weights.shape[-1], "top": top}
