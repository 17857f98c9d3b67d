"""What others offer for the same job on a CPU, called as their users would call it."""

import importlib
import importlib.util

import torch
from torch import Tensor
from torch.nn import functional as F

VECTORIZED_CHUNK = 128  # the faster of 64 and 128


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch's fused causal softmax attention."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def vectorized(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Normalized linear attention in plain torch: all chunks at once, states by a running sum."""
    t = q.shape[2]
    short = -t % VECTORIZED_CHUNK
    q, k, v = (F.pad(x, (0, 0, 0, short)).unflatten(2, (-1, VECTORIZED_CHUNK)) for x in (q, k, v))
    states = _before((k.mT @ v).cumsum(2))
    sums = _before(k.sum(3).cumsum(2))
    scores = (q @ k.mT).tril()
    out = (q @ states + scores @ v) / (q @ sums[..., None] + scores.sum(-1, keepdim=True)).clamp_min(1e-6)
    return out.flatten(2, 3)[:, :, :t]


def fast_transformers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Normalized linear attention of pytorch-fast-transformers (arXiv 2006.16236): a compiled loop over tokens."""
    product = importlib.import_module("fast_transformers.causal_product").causal_dot_product
    normalizer = torch.einsum("bhtr,bhtr->bht", q, k.cumsum(2)) + 1e-6
    return product(q, k, v) / normalizer[..., None]


def transformers_gated_delta(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor) -> Tensor:
    """The torch function that transformers falls back to where Qwen3-Next finds no GPU kernel. It scales q itself."""
    module = importlib.import_module("transformers.models.qwen3_next.modeling_qwen3_next")
    by_time = (x.transpose(1, 2) for x in (q, k, v, log_decay, beta))
    out, _ = module.torch_chunk_gated_delta_rule(*by_time)
    return out.transpose(1, 2)


def missing(name: str) -> str | None:
    """Why a peer cannot be measured here, or None if it can."""
    if name == "fast-transformers" and importlib.util.find_spec("fast_transformers") is None:
        return "not installed; pip install pytorch-fast-transformers builds it (torch must be installed before)"
    return None


def _before(running: Tensor) -> Tensor:
    """Running sums without their own term."""
    return torch.cat([torch.zeros_like(running[:, :, :1]), running[:, :, :-1]], 2)
