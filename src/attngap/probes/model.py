"""One small decoder for every mechanism: what differs between two runs is the mechanism and nothing else."""

import copy
import dataclasses
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from attngap.errors import AttngapError, unknown
from attngap.mechanisms.base import Mechanism
from attngap.ops.convolution import short_convolution
from attngap.probes.tasks.base import Task

POSITIONS = ("none", "learned", "rotary")


@dataclasses.dataclass(frozen=True)
class ModelOptions:
    """Sizes of the decoder. Values are width / heads wide; queries and keys `head_dim`, or like values when it is 0."""

    width: int = 64
    heads: int = 2
    layers: int = 2
    head_dim: int = 0
    positions: str = "none"  # or "learned", or "rotary" on queries and keys
    conv: int = 3  # taps of a short convolution with SiLU on q, k and v, for every mechanism alike; 0 for neither
    mlp: int = 0  # hidden width over width; 0 for none
    output_norm: bool = True  # each head's output to unit mean square before the last projection

    def __post_init__(self) -> None:
        for label in ("width", "heads", "layers"):
            if getattr(self, label) < 1:
                raise AttngapError(f"model: {label} must be at least 1, got {getattr(self, label)}")
        for label in ("head_dim", "conv", "mlp"):
            if getattr(self, label) < 0:
                raise AttngapError(f"model: {label} must be at least 0, got {getattr(self, label)}")
        if self.width % self.heads:
            raise AttngapError(f"model: heads must divide width, got {self.heads} heads and width {self.width}")
        if self.positions not in POSITIONS:
            raise unknown("kind of positions", self.positions, POSITIONS)
        if self.positions == "rotary" and self.key_dim % 2:
            raise AttngapError(f"model: rotary positions need an even head_dim, got {self.key_dim}")

    @property
    def key_dim(self) -> int:
        return self.head_dim or self.width // self.heads

    @property
    def value_dim(self) -> int:
        return self.width // self.heads


Make = Callable[[ModelOptions], Mechanism]


class Decoder(nn.Module):
    """Embedding, layers, read-out. The read-out is computed only where something is asked.

    Tokens share their embedding with the read-out. Real inputs enter and leave through linear maps.
    """

    def __init__(self, task: Task, mechanisms: Sequence[Make], options: ModelOptions):
        super().__init__()
        if len(mechanisms) not in (1, options.layers):
            raise AttngapError(f"model: give one mechanism or one a layer ({options.layers}), got {len(mechanisms)}")
        makes = list(mechanisms) * (options.layers if len(mechanisms) == 1 else 1)
        self.options, self.length = options, task.tokens
        width = options.width
        if task.vocabulary is None:
            self.embed = nn.Linear(task.features or 1, width)
            self.head = nn.Linear(width, task.outputs)
        else:
            self.embed = nn.Embedding(task.vocabulary, width)
            nn.init.normal_(self.embed.weight, std=width**-0.5)
            self.head = TiedHead(self.embed, task.outputs)
        self.place = (
            nn.Parameter(torch.randn(task.tokens, width) * width**-0.5) if options.positions == "learned" else None
        )
        rotary = Rotary(options.key_dim, task.tokens) if options.positions == "rotary" else None
        self.layers = nn.ModuleList(Layer(make(options), options, rotary) for make in makes)
        self.norm = nn.LayerNorm(width)

    def forward(
        self, inputs: Int[Tensor, "b t"] | Float[Tensor, "b t f"], where: Int[Tensor, "b s"]
    ) -> Float[Tensor, "b s o"]:
        x = self.embed(inputs)  # (b, t, w)
        if self.place is not None:
            x = x + self.place[: x.shape[1]]
        for layer in self.layers[:-1]:
            x = layer(x)
        return self.head(self.norm(self.layers[-1](x, where)))

    @property
    def parameter_count(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def state_floats(self, t: int) -> int:
        """Floats of state in all layers and heads after t tokens (a short convolution's last inputs not counted)."""
        return sum(layer.mechanism.kv_heads * layer.mechanism.state_floats(t) for layer in self.mixers)

    def state_rank(self, t: int) -> int:
        """The largest layer's rank, all its heads together."""
        return max(layer.mechanism.heads * layer.mechanism.state_rank(t) for layer in self.mixers)

    @property
    def mixers(self) -> list["Layer"]:
        return list(self.layers)  # type: ignore[arg-type]


class TiedHead(nn.Module):
    """Logits against the first `outputs` embeddings, with a bias."""

    def __init__(self, embed: nn.Embedding, outputs: int):
        super().__init__()
        self.embedding = [embed]  # in a list: the parameter belongs to the embedding alone
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.embedding[0].weight[: len(self.bias)], self.bias)


class Layer(nn.Module):
    """x + mix(norm(x)), then x + mlp(norm(x)) where asked for."""

    def __init__(self, mechanism: Mechanism, options: ModelOptions, rotary: "Rotary | None"):
        super().__init__()
        self.mechanism, self.rotary, self.options = mechanism, rotary, options
        width, heads = options.width, options.heads
        self.norm = nn.LayerNorm(width)
        self.sizes = [heads * options.key_dim, heads * options.key_dim, heads * options.value_dim]
        self.project = Projection(width, sum(self.sizes), options.conv)  # q, k and v in one product
        self.out = nn.Linear(width, width, bias=False)
        self.gain = nn.Parameter(torch.ones(width)) if options.output_norm else None
        self.mlp = Mlp(width, options.mlp * width) if options.mlp else None

    def forward(self, x: Float[Tensor, "b t w"], where: Int[Tensor, "b s"] | None = None) -> Float[Tensor, "b s w"]:
        """The new x, at all places or only `where`: nothing after the mixing looks at other places."""
        y = self.norm(x)
        parts = self.project(y).split(self.sizes, dim=-1)
        q, k, v = (part.unflatten(-1, (self.options.heads, -1)).transpose(1, 2) for part in parts)
        if self.rotary is not None:
            q, k = self.rotary(q), self.rotary(k)
        x_of_gates = y.to(q.dtype) if self.mechanism.gated else None  # autocast leaves y in float32
        mixed = self.mechanism.mix(x_of_gates, q, k, v).transpose(1, 2)  # (b, t, h, dv)
        if where is not None:
            x, mixed = _pick(x, where), _pick(mixed, where)
        if self.gain is not None:
            mixed = F.layer_norm(mixed, mixed.shape[-1:])
        mixed = mixed.flatten(2)
        x = x + self.out(mixed if self.gain is None else mixed * self.gain)
        return x if self.mlp is None else x + self.mlp(x)


def _pick(x: Tensor, where: Tensor) -> Tensor:
    rows = torch.arange(x.shape[0], device=x.device)[:, None]
    return x[rows, where]


class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))


class Projection(nn.Module):
    """silu(sum_j w_j * (W x_(i-j))): a linear map, a short convolution of each channel, SiLU (2312.00752, 2406.06484).

    Scores that may be negative, as those of gated and delta-rule attention, average to nothing at the start and hardly
    learn to recall; SiLU makes most of them positive. With no taps it is the linear map alone.
    """

    def __init__(self, width: int, outputs: int, taps: int):
        super().__init__()
        self.weight = nn.Parameter(nn.Linear(width, outputs, bias=False).weight.detach())
        self.taps = None
        if taps:
            self.taps = nn.Parameter(torch.randn(taps, outputs) * 0.5 * taps**-0.5)
            with torch.no_grad():
                self.taps[0] += 1.0  # the identity plus a little of the past

    def forward(self, x: Float[Tensor, "b t w"]) -> Float[Tensor, "b t o"]:
        y = F.linear(x, self.weight)
        return y if self.taps is None else short_convolution(y, self.taps)


class Rotary(nn.Module):
    """Rotary positions on queries and keys (arXiv 2104.09864), halves rotated against each other."""

    def __init__(self, dim: int, length: int):
        super().__init__()
        speed = 10_000.0 ** -(torch.arange(dim // 2) / (dim // 2))
        angle = torch.arange(length)[:, None] * speed
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, x: Float[Tensor, "b h t d"]) -> Float[Tensor, "b h t d"]:
        t = x.shape[2]
        cos, sin = self.cos[:t].to(x.dtype), self.sin[:t].to(x.dtype)  # type: ignore[index]
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


def replicate(mechanism: Mechanism) -> Make:
    """Use somebody's mechanism object: a copy of its own for every layer, sizes checked against the model's."""

    def make(options: ModelOptions) -> Mechanism:
        got = (mechanism.heads, mechanism.dim, mechanism.value_dim)
        wanted = (options.heads, options.key_dim, options.value_dim)
        if got != wanted:
            raise AttngapError(
                f"{mechanism.name}: made for (heads, dim, value_dim) = {got}, but the probe's model has {wanted}. "
                "Make it with those sizes, or set heads, head_dim and width"
            )
        return copy.deepcopy(mechanism)

    return make
