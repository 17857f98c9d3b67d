"""Hostile numbers through every op and mechanism, against float64.

A case is one head of one sequence. Its queries, keys and values are each drawn in one of several ways that arithmetic
gets wrong: huge, tiny, below all normal numbers, all zero, constant, of mixed sizes, alternating, spikes. What comes
out is held against the formula, written out below in float64 with the n x n matrix, and the difference is measured in

    (u_out + u_sum kappa_i) A_i,   A_i = sum_j |w_ij| |v_j|,

where u is half the distance from 1 to the next number of the type of the output and of the sums (float32 for half
precision), and kappa_i counts the roundings that a row's sums and exponents go through. A figure of 1 is as good as
rounding allows on average; `bound` gives the published ones.
"""

import contextlib
import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attngap import catalogue, mechanism, ops
from attngap.errors import AttngapError
from attngap.mechanisms.decoding import decoder
from attngap.mechanisms.feature_attention import FeatureAttention
from attngap.mechanisms.prompts import read_piece
from attngap.mechanisms.variants.hybrid import Hybrid
from attngap.ops import native
from attngap.ops.convolution.short import short_convolution
from attngap.ops.l2norm.rows import l2_rescale
from attngap.ops.softmax.compiled import attend_into
from tests.trust.outcome import Outcome

WAYS = ("normal", "huge", "tiny", "denormal", "zeros", "constant", "mixed", "alternating", "spikes", "repeated")
DTYPES = (torch.float32, torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16)
SEQUENCES, HEADS, GROUPS = 32, 4, 2
NAMES = {torch.float32: "float32", torch.float64: "float64", torch.bfloat16: "bfloat16", torch.float16: "float16"}
# Published, in units of rounding as above: 10 for every op and dtype, but
BOUNDS = {"linear_attention, float64": 1000.0}  # in chunks, sums of log-decays up to 1e4 a token lose as many digits
GATED = 500.0  # mechanisms compute their features and gates, too


@dataclasses.dataclass
class Case:
    """One call: inputs in their own type, and where they were drawn from."""

    draw: torch.Generator
    dtype: torch.dtype
    t: int
    r: int
    dv: int

    def tensor(self, *shape: int, span: float, signed: bool = True) -> Tensor:
        """Each sequence and head drawn in its own way; `span` is how huge huge is."""
        ways = torch.randint(len(WAYS), shape[:2], generator=self.draw)
        x = torch.stack([torch.stack([self._one(WAYS[way], shape[2:], span) for way in row]) for row in ways.tolist()])
        return (x if signed else x.abs()).to(self.dtype)

    def _one(self, way: str, shape: tuple[int, ...], span: float) -> Tensor:
        x = torch.randn(shape, generator=self.draw, dtype=torch.float64)
        smallest = torch.finfo(self.dtype).tiny
        if way == "huge":
            return span * x
        if way == "tiny":
            return x / span
        if way == "denormal":
            return smallest / 16 * x
        if way == "zeros":
            return 0 * x
        if way == "constant":
            return torch.ones_like(x)
        if way == "mixed":
            return x * span ** (2 * torch.rand(shape, generator=self.draw, dtype=torch.float64) - 1)
        if way == "alternating":
            return x.abs() * (1 - 2 * (torch.arange(shape[0]) % 2)).view(-1, *[1] * (len(shape) - 1))
        if way == "spikes":
            return x * (1 + (span - 1) * (torch.rand(shape, generator=self.draw, dtype=torch.float64) < 0.03))
        if way == "repeated":
            return x[:1].expand(shape)
        return x

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.draw, dtype=torch.float64)

    def decay(self, *shape: int) -> Tensor:
        """Logarithms of decays: none, weak, strong, beyond all numbers, by sequence and head."""
        strength = torch.tensor([0.0, 1e-4, 0.1, 5.0, 60.0, 1e4])[torch.randint(6, shape[:2], generator=self.draw)]
        return (-strength.view(*shape[:2], *[1] * (len(shape) - 2)) * self.uniform(*shape)).to(self.dtype)


@dataclasses.dataclass
class Found:
    """What came out, what is right, and how much of a difference rounding explains."""

    out: Tensor
    right: Tensor
    kappa: Tensor
    size: Tensor  # A above
    floor: Tensor | float = 1.0  # how much of the smallest normal number: what is below it on the way may become zero
    rounded: bool = False  # are sums made of what was rounded to the output's type


def wide(x: Tensor) -> Tensor:
    """(b, h_kv, ...) in float64 with the heads of q."""
    return x.double().repeat_interleave(HEADS // x.shape[1], 1)


def size(case: Case, span: float) -> tuple[Tensor, Tensor, Tensor]:
    q = case.tensor(SEQUENCES, HEADS, case.t, case.r, span=span)
    k = case.tensor(SEQUENCES, GROUPS, case.t, case.r, span=span)
    return q, k, case.tensor(SEQUENCES, GROUPS, case.t, case.dv, span=1e3 if case.dtype != torch.float16 else 10)


def softmax(case: Case) -> Found:
    q, k, v = size(case, 30)
    causal = bool(torch.randint(2, (), generator=case.draw))
    window = int(torch.randint(1, case.t + 1, (), generator=case.draw)) if causal else None
    found = ops.softmax_attention(q, k, v, causal=causal, window=window, sinks=2 if window else 0)
    scale, near = case.r**-0.5, rows(case.t, window, 2) if causal else torch.ones(case.t, case.t, dtype=torch.bool)
    logits = (scale * q.double() @ wide(k).mT).masked_fill(~near, -torch.inf)
    sums = scale * (q.double().abs() @ wide(k).abs().mT).masked_fill(~near, 0).amax(-1, keepdim=True)
    w = logits.softmax(-1)
    return Found(found, w @ wide(v), sums + case.t, w @ wide(v).abs())


def rows(t: int, window: int | None, sinks: int) -> Tensor:
    """Which keys row i may read: the last `window` and the first `sinks`."""
    i, j = torch.arange(t)[:, None], torch.arange(t)[None]
    return (j <= i) & ((i - j < window) | (j < sinks) if window else torch.ones(()).bool())


def decays(g: Tensor | None, t: int, r: int) -> Tensor:
    """exp of the sum of log-decays between j and i, (b, h, i, j, r); zero above the diagonal."""
    if g is None:
        return torch.ones(t, t, dtype=torch.float64).tril()[None, None, :, :, None]
    factor = (g.double() if g.ndim == 4 else g.double()[..., None]).exp()
    found = torch.zeros(*g.shape[:2], t, t, factor.shape[-1], dtype=torch.float64)
    for i in range(t):  # products, not differences of sums, which lose digits
        if i:
            found[:, :, i] = found[:, :, i - 1] * factor[:, :, i, None]
        found[:, :, i, i] = 1
    return found


def linear(case: Case) -> Found:
    normalize = bool(torch.randint(2, (), generator=case.draw))
    q, k, v = size(case, 1e4 if case.dtype != torch.float16 else 4)
    if normalize:
        q, k = q.abs(), k.abs()
    kind = int(torch.randint(3, (), generator=case.draw))
    shape = (SEQUENCES, GROUPS, case.t, *([case.r] if kind == 2 else []))
    g = None if kind == 0 else case.decay(*shape)
    found, _ = ops.linear_attention(q, k, v, log_decay=g, normalize=normalize)
    decay = decays(None if g is None else wide(g), case.t, case.r)
    w = torch.einsum("bhir,bhjr,bhijr->bhij", q.double(), wide(k), decay.expand(SEQUENCES, HEADS, -1, -1, case.r))
    sizes = torch.einsum(
        "bhir,bhjr,bhijr->bhij", q.double().abs(), wide(k).abs(), decay.expand(SEQUENCES, HEADS, -1, -1, case.r)
    )
    right, scale, floor = w @ wide(v), sizes @ wide(v).abs(), 1 + case.t * q.double().abs().sum(-1, keepdim=True)
    if normalize:
        n = w.sum(-1, keepdim=True).clamp_min(1e-6)
        right, scale, floor = right / n, 2 * scale / n, 1 + floor * (1 + wide(v).abs().amax(2, keepdim=True)) / n
    return Found(found, right, counted(case), scale, floor)


def counted(case: Case) -> Tensor:
    return (torch.arange(1, case.t + 1) + case.r).double()[:, None]


def delta(case: Case) -> Found:
    q, k, v = size(case, 10)
    k = (k.double() / k.double().norm(dim=-1, keepdim=True).clamp_min(1)).to(
        case.dtype
    )  # else the rule itself explodes
    beta = (case.uniform(SEQUENCES, GROUPS, case.t) * (1 - 1e-3)).to(case.dtype)
    kind = int(torch.randint(3, (), generator=case.draw))
    g = None if kind == 0 else case.decay(SEQUENCES, GROUPS, case.t, *([case.r] if kind == 2 else []))
    found, _ = ops.delta_attention(q, k, v, beta, log_decay=g)
    S = torch.zeros(SEQUENCES, HEADS, case.r, case.dv, dtype=torch.float64)
    held = torch.zeros(SEQUENCES, HEADS, 1, dtype=torch.float64)
    right, scale = [], []
    K, V, B = wide(k), wide(v), wide(beta)
    G = None if g is None else wide(g).view(SEQUENCES, HEADS, case.t, -1)
    for i in range(case.t):
        if G is not None:
            S = G[:, :, i].exp()[..., None] * S
        error = V[:, :, i] - torch.einsum("bhr,bhrd->bhd", K[:, :, i], S)
        S = S + B[:, :, i, None, None] * K[:, :, i, :, None] * error[:, :, None]
        right.append(torch.einsum("bhr,bhrd->bhd", q[:, :, i].double(), S))
        held = held + V[:, :, i].norm(dim=-1, keepdim=True)
        scale.append(q[:, :, i].double().norm(dim=-1, keepdim=True) * held)
    return Found(found, torch.stack(right, 2), counted(case), torch.stack(scale, 2))


def hybrid(case: Case) -> Found:
    q, k, v = size(case, 30)
    fq = case.tensor(SEQUENCES, HEADS, case.t, case.r, span=30, signed=False)
    fk = case.tensor(SEQUENCES, GROUPS, case.t, case.r, span=30, signed=False)
    window = int(torch.randint(1, 20, (), generator=case.draw))
    relative = bool(torch.randint(2, (), generator=case.draw))
    gain = (20 * case.uniform(SEQUENCES, HEADS, case.t) - 10).to(case.dtype)
    found, _ = ops.hybrid_attention(q, k, v, fq, fk, window=window, sinks=2, log_gain=gain, relative=relative)
    scale, near = case.r**-0.5, rows(case.t, window, 2)
    far = rows(case.t, None, 0) & ~near
    logits = (scale * q.double() @ wide(k).mT).masked_fill(~near, -torch.inf)
    sums = scale * (q.double().abs() @ wide(k).abs().mT).masked_fill(~near, 0).amax(-1, keepdim=True)
    top = logits.amax(-1, keepdim=True)
    features = (fq.double() @ wide(fk).mT).masked_fill(~far, 0).log() + gain.double()[..., None]
    together = torch.where(near, logits, features + (top if relative else 0))
    w = together.softmax(-1)
    kappa = sums + gain.double().abs()[..., None] + counted(case)
    return Found(found, w @ wide(v), kappa, w @ wide(v).abs())


def convolution(case: Case) -> Found:
    x = case.tensor(SEQUENCES, 1, case.t, 16, span=1e3)[:, 0]
    taps = case.tensor(1, 1, 4, 16, span=3)[0, 0]
    found = short_convolution(x, taps)
    back = torch.nn.functional.pad(x.double(), (0, 0, 3, 0))
    parts = [taps[j].double() * back[:, 3 - j : 3 - j + case.t] for j in range(4)]
    total, sizes = torch.stack(parts).sum(0), torch.stack(parts).abs().sum(0)
    # silu is at most 1.1 times as steep as its argument, and computed by an exponent of it
    return Found(found, torch.nn.functional.silu(total), 4 + total.abs(), sizes)


def l2norm(case: Case) -> Found:
    x = case.tensor(SEQUENCES, HEADS, case.t, case.r, span=1e4 if case.dtype != torch.float16 else 10)
    found = l2_rescale(x, 1.0)
    right = x.double() / x.double().norm(dim=-1, keepdim=True).clamp_min(1e-12)
    return Found(found, right, torch.tensor(float(case.r)), right.norm(dim=-1, keepdim=True).expand_as(right))


OPS: dict[str, Callable[[Case], Found]] = {
    "softmax_attention": softmax,
    "linear_attention": linear,
    "delta_attention": delta,
    "hybrid_attention": hybrid,
    "short_convolution": convolution,
    "l2_rescale": l2norm,
}


def mixer(name: str) -> Callable[[Case], Found]:
    """A mechanism of the catalogue in its fast form; its own float64 copy says what is right, as an n x n matrix."""

    def run(case: Case) -> Found:
        options: dict[str, Any] = {"window": 5, "sinks": 2} if name == "hybrid" else {}
        made = mechanism(name, HEADS, 8, 8, kv_heads=GROUPS, **options)
        with torch.no_grad():
            for weight in made.parameters():
                weight.add_(0.2 * torch.randn(weight.shape, generator=case.draw))
        case = dataclasses.replace(case, r=8, dv=8)
        q, k, v = size(case, 6)
        x = case.tensor(SEQUENCES, 1, case.t, made.model_dim or 1, span=6)[:, 0] if made.gated else None
        with torch.no_grad():
            found, _ = made.to(case.dtype)(x, q, k, v)
            exact = copy.deepcopy(made).double()
            streams = exact.read(None if x is None else x.double(), q.double(), k.double(), v.double())
            w = exact.weights(streams)
        sums = exponents(q, k)
        right, sizes = w @ wide(v), (w.abs() @ wide(v).abs()).cummax(2)[0]
        n = torch.ones_like(sizes)
        if (
            isinstance(made, FeatureAttention) and streams.q.shape[-1] == streams.k.shape[-1]
        ):  # a normalizer of both signs may be far smaller than what it adds up
            parts = (streams.q.abs() @ wide(streams.k).abs().mT).tril()
            n = (streams.q @ wide(streams.k).mT).tril().sum(-1, keepdim=True).abs().clamp_min(1e-6)
            sizes = (parts @ wide(v).abs() + right.abs() * parts.sum(-1, keepdim=True)) / n
        floor = 1 + case.t * (1 + sums) * wide(v).abs().amax(2, keepdim=True) / n
        return Found(found, right, counted(case) + sums, sizes, floor, rounded=True)

    return run


def exponents(q: Tensor, k: Tensor) -> Tensor:
    """How large the exponents of features of each row may be, about."""
    return (q.double().square().sum(-1) + wide(k).square().sum(-1).amax(-1, keepdim=True))[..., None]


def layer(case: Case) -> Found:
    """A converted layer as a model calls it: a prompt by one compiled call, then token by token by another."""
    case = dataclasses.replace(case, r=8, dv=8)
    q, k, v = size(case, 6)
    made = mechanism("hybrid", HEADS, 8, 8, kv_heads=GROUPS, rotary={}, feature_map="prototype", gain="query",
                     map_options={"decay": True}, window=5, sinks=2, relative=False)  # fmt: skip
    assert isinstance(made, Hybrid)
    for weight in made.requires_grad_(False).parameters():
        weight.add_(0.2 * torch.randn(weight.shape, generator=case.draw))
    turned = 6 * case.uniform(1, case.t, 8)
    cos, sin = turned.cos().to(case.dtype), turned.sin().to(case.dtype)
    prompt = min(case.t, 2 + int(torch.randint(case.t, (), generator=case.draw)))
    outs, state, count = [], None, torch.zeros(SEQUENCES, dtype=torch.long)
    with torch.no_grad():
        exact = copy.deepcopy(made).double()
        made = made.to(case.dtype)
        for start, stop in ((0, prompt), *((i, i + 1) for i in range(prompt, case.t))):
            part, angles = [x[:, :, start:stop] for x in (q, k, v)], (cos[:, start:stop], sin[:, start:stop])
            if stop - start > 1:
                out, state = read_piece(made, *part, rotary=angles) or (None, None)
                count += stop - start
            else:
                state = made.init_state(made.read(None, *part, rotary=angles)) if state is None else state
                call = decoder(made, state, torch.full((HEADS,), -1), count, angles)
                out = None if call is None else call.token(*part, angles, None, None).transpose(1, 2)
            assert out is not None, "no compiled call was made"
            outs.append(out)
        rotary = cos.double(), sin.double()
        w = exact.weights(exact.read(None, q.double(), k.double(), v.double(), rotary=rotary))
    sums, sizes = exponents(q, k), (w.abs() @ wide(v).abs()).cummax(2)[0]
    floor = 1 + case.t * (1 + sums) * wide(v).abs().amax(2, keepdim=True)
    return Found(torch.cat(outs, 2), w @ wide(v), counted(case) + sums, sizes, floor, rounded=True)


def kept(case: Case) -> Found:
    """Heads that keep softmax, new rows over a cache in which some keys may not be read."""
    q, k, v = size(case, 30)
    new = 1 + int(torch.randint(case.t, (), generator=case.draw))
    q, allowed = q[:, :, -new:], torch.rand(SEQUENCES, case.t, generator=case.draw) < 0.8
    found, place = q.new_zeros(*q.shape[:3], case.dv), torch.arange(HEADS) // (HEADS // GROUPS)
    attend_into(found, q, k, v, place, allowed=allowed)
    scale, may = case.r**-0.5, rows(case.t, None, 0)[-new:] & allowed[:, None, None]
    logits = (scale * q.double() @ wide(k).mT).masked_fill(~may, -torch.inf)
    sums = scale * (q.double().abs() @ wide(k).abs().mT).masked_fill(~may, 0).amax(-1, keepdim=True)
    w = logits.softmax(-1).nan_to_num(0.0)  # rows that may read nothing are zero
    return Found(found, w @ wide(v), sums + case.t, w @ wide(v).abs())


CALLS: dict[str, Callable[[Case], Found]] = {"layer of a converted model": layer, "kept heads": kept}


def compared(name: str, case: Case, run: Callable[[Case], Found], form: str) -> Outcome:
    """How far from what is right, at worst, in units of rounding."""
    outcome = Outcome()
    kind = f"{name}, {NAMES[case.dtype]}, {form}"
    try:
        with contextlib.nullcontext() if form == "compiled" else native.off():
            found = run(case)
    except AttngapError as error:
        if case.dtype != torch.float16 or name in OPS:  # features of a mechanism may be too large for float16
            outcome.faults.append(f"{kind}: {error}")
        outcome.count(f"{kind}, refused", SEQUENCES * HEADS)
        return outcome
    out, sums = (torch.finfo(dtype) for dtype in (case.dtype, torch.promote_types(case.dtype, torch.float32)))
    step = out.eps if found.rounded else sums.eps
    unit = (out.eps + step * found.kappa) / 2 * found.size + out.tiny * found.floor
    fits = found.size < out.max / 4  # else it may be infinite, though never undefined
    undefined = torch.where(found.out.isnan(), torch.inf, 0.0)
    apart = torch.where(fits, (found.out.double() - found.right).abs() / unit, undefined)
    cases = found.out.shape[0] * (found.out.shape[1] if found.out.ndim == 4 else 1)
    outcome.count(kind, cases)
    worst = float("inf") if apart.isnan().any() else float(apart.max())
    outcome.measure(kind, worst)
    return outcome


def batch(number: int) -> Outcome:
    """Every op and call once, and some mechanisms, at one random size and in one type."""
    draw = torch.Generator().manual_seed(number)
    outcome = Outcome()
    names = catalogue()
    chosen = {
        **OPS,
        **{name: mixer(name) for name in (names[number % len(names)], names[(7 * number + 3) % len(names)])},
    }
    for name, run in chosen.items():
        t, r, dv = (int(torch.randint(1, most, (), generator=draw)) for most in (65, 40, 24))
        dtype = DTYPES[int(torch.randint(len(DTYPES), (), generator=draw))]
        form = "compiled" if int(torch.randint(3, (), generator=draw)) else "torch"
        outcome.add(compared(name, Case(draw, dtype, t, r, dv), run, form))
    for name, run in CALLS.items() if native.available() else ():  # there is no other form of them
        t, r, dv = (int(torch.randint(1, most, (), generator=draw)) for most in (65, 40, 24))
        dtype = (torch.float32, torch.float32, torch.float64)[int(torch.randint(3, (), generator=draw))]
        outcome.add(compared(name, Case(draw, dtype, t, r, dv), run, "compiled"))
    for kind, figure in outcome.worst.items():
        most = bound(kind.rsplit(", ", 1)[0])
        if not figure <= most:
            outcome.faults.append(f"{kind}: {figure:.3g} units of rounding, more than {most:g}, batch {number}")
    return outcome


def bound(kind: str) -> float:
    """Of an op or a mechanism and a dtype, such as "delta_attention, float32"."""
    return BOUNDS.get(kind, 10.0 if kind.split(", ")[0] in (*OPS, "kept heads") else GATED)
