"""Gates: how much a memory keeps (log_decay <= 0) and how strongly it writes (beta), computed from the layer's input.

Key-side like the keys: one gate for each key head.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from attngap.errors import AttngapError
from attngap.ops.check import accumulate_dtype


class Gate(nn.Module):
    """Maps x `(b, t, m)` to a gate `(b, h_kv, t)` or `(b, h_kv, t, dim)`, in float32 at least: decays multiply up."""

    def __init__(self, name: str, model_dim: int):
        super().__init__()
        if not isinstance(model_dim, int) or model_dim < 1:
            raise AttngapError(f"{name}: model_dim must be a whole number of at least 1, got {model_dim!r}")
        self.name, self.model_dim = name, model_dim

    def forward(self, x: Float[Tensor, "b t m"]) -> Tensor:
        if x.shape[-1] != self.model_dim:
            raise AttngapError(
                f"{self.name}: x must have {self.model_dim} channels, got {x.shape[-1]}; set the option model_dim"
            )
        return self.gate(x.to(accumulate_dtype(x.dtype)))

    def gate(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class LogSigmoidGate(Gate):
    """log_decay = logsigmoid(x A B + bias) / 16, one for each channel of each key, A B of low rank (2312.06635)."""

    def __init__(self, name: str, model_dim: int, heads: int, dim: int, rank: int = 16, temperature: float = 16.0):
        super().__init__(name, model_dim)
        self.heads, self.temperature = heads, temperature
        self.down = nn.Linear(model_dim, rank, bias=False)
        self.up = nn.Linear(rank, heads * dim)

    def gate(self, x):
        logit = _project(self.up, _project(self.down, x)).unflatten(-1, (self.heads, -1))  # (b, t, h, d)
        return F.logsigmoid(logit).transpose(1, 2) / self.temperature


class StepSizeGate(Gate):
    """dt = softplus(x W + bias) and log_decay = -exp(a) dt: Mamba's discretized decay (2405.21060).

    `dim` None gives one number a head; otherwise one a channel through a low-rank W. dt starts between 0.001 and 0.1,
    even in the logarithm over the heads (over a head's channels), nearly the same for every x, and exp(a) at 1:
    memories of 10 to 1000 tokens. The papers draw dt at random and exp(a) from [1, 16]; with two heads that mostly
    leaves none that looks 50 tokens back.
    """

    def __init__(self, name: str, model_dim: int, heads: int, dim: int | None = None, rank: int | None = None):
        super().__init__(name, model_dim)
        self.heads, self.dim = heads, dim
        width = heads * (dim or 1)
        self.down = nn.Linear(model_dim, rank, bias=False) if rank else None
        self.project = nn.Linear(rank or model_dim, width, bias=False)
        with torch.no_grad():
            self.project.weight *= 0.1
        self.log_rate = nn.Parameter(torch.zeros(heads))
        spread = (torch.arange(dim or heads) + 0.5) / (dim or heads)  # in (0, 1)
        dt = torch.exp(spread * math.log(100) + math.log(0.001)).repeat(heads if dim else 1)
        self.bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))  # softplus(bias) = dt

    def step_size(self, x: Tensor) -> Tensor:
        """dt, (b, h, t) or (b, h, t, dim)."""
        x = x.to(accumulate_dtype(x.dtype))
        inner = x if self.down is None else _project(self.down, x)
        dt = F.softplus(_project(self.project, inner) + self.bias.to(x.dtype))
        return dt.unflatten(-1, (self.heads, self.dim)).transpose(1, 2) if self.dim else dt.transpose(1, 2)

    def gate(self, x):
        rate = self.log_rate.to(x.dtype).exp()
        return -self.step_size(x) * (rate[:, None, None] if self.dim else rate[:, None])


class WriteGate(Gate):
    """beta = sigmoid(x W): how much of the old value under a key is replaced (2406.06484)."""

    def __init__(self, name: str, model_dim: int, heads: int):
        super().__init__(name, model_dim)
        self.project = nn.Linear(model_dim, heads, bias=False)

    def gate(self, x):
        return _project(self.project, x).sigmoid().transpose(1, 2)


def _project(layer: nn.Linear, x: Tensor) -> Tensor:
    """The layer in the precision of x, whatever its weights are stored in."""
    return F.linear(x, layer.weight.to(x.dtype), None if layer.bias is None else layer.bias.to(x.dtype))


def retention_decay(heads: int) -> Float[Tensor, " heads"]:
    """log(1 - 2^(-5 - i)) for head i: fixed decays from 1/32 a token down (2307.08621)."""
    return torch.log1p(-(2.0 ** (-5.0 - torch.arange(heads, dtype=torch.float64)))).float()
