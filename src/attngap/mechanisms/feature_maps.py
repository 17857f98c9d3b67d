"""Feature maps: phi_q and phi_k such that phi_q(q) . phi_k(k) is the weight of a key before normalization.

A map has a query side and a key side. With grouped queries the key side has one set of parameters for each key head,
and random projections are shared by a group, without which products of features would estimate nothing.
"""

import itertools
import math
from collections import Counter
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from attngap.errors import AttngapError, unknown
from attngap.mechanisms.options import build
from attngap.ops.check import accumulate_dtype

FASTEST = 1 / 400  # rate at which a feature fades: what a window holds is not its business
FADED = 40.0  # largest exponent of what has faded: sums of e^40 and values times e^-40 are ordinary float32
LARGEST_SCALE, LARGEST_SIZE = 15.0, 20.0  # exponents of a prototype's query scale and of its key features
SLOW, FAST = 1e-5, 2e-3  # rates that features begin with
LARGEST_WIDTH = 2**18  # features; a state wider than this is a mistake, not a plan


class FeatureMap(nn.Module):
    """`query` and `key` map `(b, h, t, dim)` to `(b, h, t, width)`; `key` gets the key heads.

    A map writes `query_features` and `key_features`, or `features` if it treats both alike. Half precision is computed
    in float32: an exponent rounded to eight bits is a wrong weight.
    """

    name: ClassVar[str]
    positive: ClassVar[bool]  # are all features >= 0, so that weights are too
    learned: ClassVar[bool] = False
    of_scores: ClassVar[bool] = False  # is phi(q) . phi(k) a function of q . k alone, given by `kernel`

    def __init__(self, heads: int, dim: int, kv_heads: int):
        super().__init__()
        self.heads, self.dim, self.kv_heads = heads, dim, kv_heads
        self.width = dim

    @property
    def rank(self) -> int:
        """The dimension of the space its key features span: the width, unless they obey a linear relation."""
        return self.width

    def query(self, x: Float[Tensor, "b h t d"], position: Int[Tensor, "#b t"]) -> Float[Tensor, "b h t r"]:
        return self.query_features(x.to(accumulate_dtype(x.dtype)), position).to(x.dtype)

    def key(
        self, x: Float[Tensor, "b h t d"], position: Int[Tensor, "#b t"] | Int[Tensor, "b h t"]
    ) -> Float[Tensor, "b h t r"]:
        """`position` may differ from head to head."""
        return self.key_features(x.to(accumulate_dtype(x.dtype)), position).to(x.dtype)

    def query_features(self, x: Tensor, position: Tensor) -> Tensor:
        return self.features(x, position)

    def key_features(self, x: Tensor, position: Tensor) -> Tensor:
        return self.features(x, position)

    def features(self, x: Tensor, position: Tensor) -> Tensor:
        raise NotImplementedError

    def kernel(self, scores: Tensor) -> Tensor:
        """phi(q) . phi(k) from q . k / sqrt(d)."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"heads={self.heads}, dim={self.dim}, width={self.width}"


class Identity(FeatureMap):
    """phi(x) = x: the scores themselves."""

    name, positive = "identity", False

    def features(self, x, position):
        return x


class Elu(FeatureMap):
    """phi(x) = elu(x) + 1 (arXiv 2006.16236)."""

    name, positive = "elu", True

    def features(self, x, position):
        return ShiftedElu.apply(x)


class ShiftedElu(torch.autograd.Function):
    """y = elu(x) + 1 = exp(min(x, 0)) + max(x, 0), with dy/dx = min(y, 1).

    torch's own backward of elu takes ten times as long where the gradient lies otherwise in memory than x, as it does
    behind an attention op.
    """

    @staticmethod
    def forward(ctx, x):
        y = x.clamp(max=0).exp_().add_(x.clamp(min=0))
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, *grads):
        (y,) = ctx.saved_tensors
        return y.clamp(max=1) * grads[0]


class Relu(FeatureMap):
    """phi(x) = relu(x) (as in EfficientViT, arXiv 2205.14756)."""

    name, positive = "relu", True

    def features(self, x, position):
        return F.relu(x)


class Polynomial(FeatureMap):
    """phi(q) . phi(k) = (q . k / sqrt(d))^degree, by the C(d + degree - 1, degree) distinct monomials.

    Each monomial carries the square root of its multinomial coefficient, so the width is that of the symmetric tensor
    and not d^degree.
    """

    factors: Tensor  # (degree, d, r), one entry in each column
    name, positive = "polynomial", False  # the features are signed; the weights are >= 0 for an even degree
    of_scores = True

    def __init__(self, heads: int, dim: int, kv_heads: int, *, degree: int = 2):
        super().__init__(heads, dim, kv_heads)
        if not isinstance(degree, int) or degree < 1:
            raise AttngapError(f"polynomial: degree must be a whole number of at least 1, got {degree!r}")
        self.degree = degree
        self.width = math.comb(dim + degree - 1, degree)
        if self.width > LARGEST_WIDTH:
            raise AttngapError(
                f"polynomial: degree {degree} at dim {dim} needs {self.width} features, at most {LARGEST_WIDTH} are "
                "allowed; lower degree or dim"
            )
        index, coefficient = monomials(dim, degree)
        factors = F.one_hot(index.T, dim).mT.double()  # (degree, d, r)
        factors[0] *= coefficient * dim ** (-degree / 4)
        self.register_buffer("factors", factors, persistent=False)

    def features(self, x, position):
        """Each factor by a product of matrices: as exact as indexing, and several times as fast with its backward."""
        product, *others = (x @ factor for factor in self.factors.to(x.dtype))  # (b, h, t, r)
        for other in others:
            product = product * other
        return product

    def kernel(self, scores):
        return scores**self.degree


class Taylor(FeatureMap):
    """phi(q) . phi(k) = 1 + s + s^2 / 2 with s = q . k / sqrt(d): exp to second order (Based, 2402.18668)."""

    name, positive = "taylor", False  # the features are signed; the weights 1 + s + s^2/2 >= 1/2 are not
    of_scores = True

    def __init__(self, heads: int, dim: int, kv_heads: int):
        super().__init__(heads, dim, kv_heads)
        self.square = Polynomial(heads, dim, kv_heads, degree=2)
        self.width = 1 + dim + self.square.width

    def features(self, x, position):
        one = torch.ones_like(x[..., :1])
        return torch.cat([one, x * self.dim**-0.25, self.square.features(x, position) * 0.5**0.5], -1)

    def kernel(self, scores):
        return 1 + scores * (1 + scores / 2)


class Favor(FeatureMap):
    """phi(x)_i = exp(w_i . x - |x|^2 / 2) / sqrt(m), x scaled by d^(-1/4), w orthogonal (FAVOR+, arXiv 2009.14794).

    E phi(q) . phi(k) = exp(q . k / sqrt(d)). Stabilized without bias: a query is divided by its own largest feature, a
    factor of the whole row that normalization cancels; keys share one constant, fixed by w alone, because
    w . x - |x|^2/2 <= |w|^2 / 2. (Subtracting the largest key seen, as in the released code, looks ahead.)
    """

    projection: Tensor  # (h_kv, m, d)
    name, positive = "favor", True

    def __init__(self, heads: int, dim: int, kv_heads: int, *, features: int | None = None, seed: int = 0):
        super().__init__(heads, dim, kv_heads)
        self.width = _count("favor", features, max(1, int(dim * math.log(dim))))
        generator = torch.Generator().manual_seed(seed)
        blocks = [orthogonal_gaussian(self.width, dim, generator) for _ in range(kv_heads)]
        self.register_buffer("projection", torch.stack(blocks))

    def query_features(self, x, position):
        exponent = self.exponent(x)
        return (exponent - self.query_shift(exponent)).exp() * self.width**-0.5

    def key_features(self, x, position):
        return (self.exponent(x) - self.key_shift()).exp() * self.width**-0.5

    def exponent(self, x: Float[Tensor, "b h t d"]) -> Float[Tensor, "b h t m"]:
        x = x * self.dim**-0.25
        w = self.projection.to(x.dtype).repeat_interleave(x.shape[1] // self.kv_heads, 0)
        return x @ w.mT - x.square().sum(-1, keepdim=True) / 2

    def query_shift(self, exponent: Float[Tensor, "b h t m"]) -> Float[Tensor, "b h t 1"]:
        return exponent.detach().amax(-1, keepdim=True)

    def key_shift(self) -> float:
        """Zero until |w|^2 / 2 leaves the range of float32 sums, around dim 100."""
        return max(0.0, float(self.projection.square().sum(-1).max()) / 2 - 60.0)


class Rff(FeatureMap):
    """phi(x) = [sin(w_i . x), cos(w_i . x)] / sqrt(D), w ~ N(0, sigma^2), x of unit length (RFA, arXiv 2103.02143).

    E phi(q) . phi(k) = exp(sigma^2 (q . k - 1)). Signed: a normalizer may vanish, see `attngap.ops`.
    """

    projection: Tensor  # (h_kv, D, d)
    name, positive = "rff", False

    def __init__(
        self, heads: int, dim: int, kv_heads: int, *, features: int | None = None, sigma: float = 1.0, seed: int = 0
    ):
        super().__init__(heads, dim, kv_heads)
        count = _count("rff", features, dim)
        if not sigma > 0:
            raise AttngapError(f"rff: sigma must be positive, got {sigma!r}")
        self.sigma, self.width = sigma, 2 * count
        generator = torch.Generator().manual_seed(seed)
        self.register_buffer("projection", torch.randn(kv_heads, count, dim, generator=generator))

    def features(self, x, position):
        w = self.projection.to(x.dtype).repeat_interleave(x.shape[1] // self.kv_heads, 0)
        angle = F.normalize(x, dim=-1) @ (self.sigma * w).mT
        return torch.cat([angle.sin(), angle.cos()], -1) * (self.width // 2) ** -0.5


class Cosformer(FeatureMap):
    """phi(q_i) . phi(k_j) = relu(q_i) . relu(k_j) cos(pi/2 (i - j) / length) (arXiv 2202.08791).

    Twice the width: cos(a - b) = cos a cos b + sin a sin b. Weights are >= 0 up to a distance of `length`, so longer
    sequences are refused.
    """

    name, positive = "cosformer", True

    def __init__(self, heads: int, dim: int, kv_heads: int, *, length: int = 65536):
        super().__init__(heads, dim, kv_heads)
        self.length = _count("cosformer", length, length, "length")
        self.width = 2 * dim

    def features(self, x, position):
        last = int(position.max())
        if last >= self.length:
            raise AttngapError(f"cosformer: position {last} is past length={self.length}; raise the option `length`")
        position = position if position.ndim == 3 else position[:, None]
        angle = (position.to(x.dtype) * (math.pi / 2 / self.length))[..., None]
        x = F.relu(x)
        return torch.cat([x * angle.cos(), x * angle.sin()], -1)


class Hedgehog(FeatureMap):
    """phi(x) = [softmax(x W), softmax(-x W)], W learned for each head, one for queries and one for keys (2402.04347).

    W starts as the identity, or orthogonal when `features`, the width of one half, differs from dim. Both halves sum to
    one, so the rank is one below the width.
    """

    name, positive, learned = "hedgehog", True, True

    def __init__(self, heads: int, dim: int, kv_heads: int, *, features: int | None = None):
        super().__init__(heads, dim, kv_heads)
        half = _count("hedgehog", features, dim)
        self.width = 2 * half
        self.query_weight = nn.Parameter(_mixing(heads, dim, half))
        self.key_weight = nn.Parameter(_mixing(kv_heads, dim, half))

    @property
    def rank(self) -> int:
        return self.width - 1

    def query_features(self, x, position):
        return _both_signs(x @ self.query_weight.to(x.dtype))

    def key_features(self, x, position):
        return _both_signs(x @ self.key_weight.to(x.dtype))


class Prototype(FeatureMap):
    """phi(q) = exp(c) softmax(q A + a), psi(k) = exp(k P + b): a query is a mixture of `features` prototype queries.

    Column i of P is a prototype times the temperature, so psi_i(k) is the weight softmax gives k for the query p_i: the
    map is exact at the prototypes and interpolates between them. All of A, a, c, P, b are learned, key-side ones for
    each key head; `attngap.mechanisms.fit` starts them from the queries a head really sees.

    With `decay` feature i of a key fades as exp(-rate_i distance), at rates that are learned. It is written as
    exp(-rate_i position) on the query side and exp(rate_i position) on the key side, so that nothing but the features
    knows of it. What is beyond exponents of `FADED` does not fade any further.
    """

    name, positive, learned = "prototype", True, True

    def __init__(self, heads: int, dim: int, kv_heads: int, *, features: int | None = None, decay: bool = False):
        super().__init__(heads, dim, kv_heads)
        self.width = _count("prototype", features, 2 * dim)
        spread = orthogonal_gaussian(self.width, dim, torch.Generator().manual_seed(0)).mT * dim**-0.5  # (d, r)
        self.query_weight = nn.Parameter(spread.repeat(heads, 1, 1))
        self.query_bias = nn.Parameter(torch.zeros(heads, 1, self.width))
        self.query_scale = nn.Parameter(torch.zeros(heads, 1, self.width))
        self.key_weight = nn.Parameter(spread.repeat(kv_heads, 1, 1))
        self.key_bias = nn.Parameter(torch.zeros(kv_heads, 1, self.width))
        self.log_rate = nn.Parameter(_rates(self.width).log().repeat(kv_heads, 1, 1)) if decay else None

    def query_features(self, x, position):
        weight, bias, scale = (p.to(x.dtype) for p in (self.query_weight, self.query_bias, self.query_scale))
        mixed = (x @ weight + bias).softmax(-1)
        mixed = mixed * scale.clamp(-LARGEST_SCALE, LARGEST_SCALE).exp()
        if self.log_rate is None:
            return mixed
        left = (-self._faded(x, position)).exp()  # (b, h_kv, t, r): once for all heads that share a key head
        return (mixed.unflatten(1, (self.kv_heads, -1)) * left[:, :, None]).flatten(1, 2)

    def key_features(self, x, position):
        # Sums over millions of keys, times a query scale of e^15, stay far inside float32.
        size = (x @ self.key_weight.to(x.dtype) + self.key_bias.to(x.dtype)).clamp(max=LARGEST_SIZE)
        return size.exp() if self.log_rate is None else (size + self._faded(x, position)).exp()

    def rates(self) -> Float[Tensor, "h_kv 1 r"]:
        """How fast each feature fades, per token."""
        assert self.log_rate is not None
        return self.log_rate.exp().clamp(max=FASTEST)

    def _faded(self, x: Tensor, position: Tensor) -> Float[Tensor, "b h_kv t r"]:
        position = position if position.ndim == 3 else position[:, None]
        return (self.rates().to(x.dtype) * position[..., None]).clamp(max=FADED)


class Nothing(FeatureMap):
    """phi(x) = 0: no weight at all. In a hybrid this leaves sinks and window only (StreamingLLM, arXiv 2309.17453)."""

    name, positive = "none", True

    def __init__(self, heads: int, dim: int, kv_heads: int):
        super().__init__(heads, dim, kv_heads)
        self.width = 1

    @property
    def rank(self) -> int:
        return 0

    def features(self, x, position):
        return torch.zeros_like(x[..., :1])


FEATURE_MAPS = (Nothing, Identity, Elu, Relu, Polynomial, Taylor, Favor, Rff, Cosformer, Hedgehog, Prototype)


def feature_map(name: str, heads: int, dim: int, kv_heads: int, **options: Any) -> FeatureMap:
    """The map of that name: `feature_map("polynomial", heads=8, dim=64, kv_heads=2, degree=3)`."""
    for cls in FEATURE_MAPS:
        if cls.name == name:
            return build(cls, f"{name} map", (heads, dim, kv_heads), options)
    raise unknown("feature map", name, [cls.name for cls in FEATURE_MAPS])


def monomials(dim: int, degree: int) -> tuple[Int[Tensor, "r degree"], Float[Tensor, " r"]]:
    """Variables of each monomial of the degree, and the square root of its multinomial coefficient."""
    index = list(itertools.combinations_with_replacement(range(dim), degree))
    repeats = [math.prod(math.factorial(n) for n in Counter(row).values()) for row in index]
    ways = torch.tensor(repeats, dtype=torch.float64).reciprocal() * math.factorial(degree)
    return torch.tensor(index), ways.sqrt()


def orthogonal_gaussian(count: int, dim: int, generator: torch.Generator) -> Float[Tensor, "count dim"]:
    """Rows that are each N(0, I), orthogonal within every block of `dim`: lower variance than independent rows."""
    blocks = []
    for start in range(0, count, dim):
        q, r = torch.linalg.qr(torch.randn(dim, dim, generator=generator, dtype=torch.float64))
        q = q * r.diagonal().sign()  # uniform over rotations only with the signs fixed
        length = torch.randn(dim, dim, generator=generator, dtype=torch.float64).norm(dim=1, keepdim=True)
        blocks.append((q.T * length)[: min(dim, count - start)])
    return torch.cat(blocks).float()


def _mixing(heads: int, dim: int, width: int) -> Tensor:
    one = torch.eye(dim) if width == dim else nn.init.orthogonal_(torch.empty(dim, width))
    return one.repeat(heads, 1, 1)  # (h, d, f)


def _rates(count: int) -> Float[Tensor, " r"]:
    """From slow to fast, in any order: features that begin alike shall not fade alike."""
    even = torch.linspace(math.log(SLOW), math.log(FAST), count).exp()
    return even[torch.randperm(count, generator=torch.Generator().manual_seed(0))]


def _both_signs(x: Tensor) -> Tensor:
    return torch.stack([x, -x], -2).softmax(-1).flatten(-2)  # one softmax, and a backward without copies


def _count(name: str, given: int | None, default: int, label: str = "features") -> int:
    value = default if given is None else given
    if not isinstance(value, int) or value < 1:
        raise AttngapError(f"{name}: {label} must be a whole number of at least 1, got {value!r}")
    return value
