"""Fit a layer's replacement to the layer's own softmax outputs: features and gains of all its heads at once."""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attngap.errors import AttngapError
from attngap.mechanisms.base import Mechanism
from attngap.mechanisms.far_rows import FarRows
from attngap.mechanisms.feature_maps import Prototype
from attngap.mechanisms.rotary import Angles
from attngap.mechanisms.variants.hybrid import Hybrid

CLUSTER_ROUNDS = 5
CLUSTER_SAMPLE = 4096  # queries of a group that prototypes are looked for in
GAIN_OFFSETS = (0.0, -1.0, -2.0, -3.0, -4.5, -6.0, -9.0)  # of a head's first log-gain; at -9 there is hardly a far part
INIT_TOKENS = 2**14  # tokens that features begin from, at most
OFFSET_PASSAGES = 3  # passages that first gains are chosen on
SILENT = -60.0  # the log-gain of a head that reads sinks and window only
DISTANCES = 512  # at which an average over distances looks


@dataclasses.dataclass(frozen=True)
class FitOptions:
    """How long and how fast; the defaults are those of a conversion, `QUICK` those of a diagnosis."""

    steps: int = 60
    rate: float = 1e-2
    batch: int = 1  # passages a step
    check: int = 20  # steps between looks at the held-out passages
    heldout: int = 1  # passages, the last ones, that are never trained on
    seed: int = 0
    sharpness: float = 8.0  # of the first mixture, in units of the squared distance from a query to its prototype
    settle: bool = True  # choose each head's first gain, by what fits best
    horizon: int | None = None  # distances that turned-back features begin with; None: those of the passages


QUICK = FitOptions(steps=16, check=16, sharpness=2.0, settle=False)


class Seen(NamedTuple):
    """What a layer read and wrote in some passages of one length, and the cos and sin of their positions."""

    q: Float[Tensor, "b h t d"]
    k: Float[Tensor, "b h_kv t d"]
    v: Float[Tensor, "b h_kv t dv"]
    target: Float[Tensor, "b h t dv"]
    rotary: Angles | None = None

    def only(self, which: slice | Tensor) -> "Seen":
        q, k, v, target = (x[which] for x in self[:4])
        if self.rotary is None:
            return Seen(q, k, v, target)
        cos, sin = (x if len(x) == 1 else x[which] for x in self.rotary)
        return Seen(q, k, v, target, (cos, sin))


Misfit = Callable[
    [int, "slice | Tensor"], Float[Tensor, " h"]
]  # (place of a batch, its passages) -> error of each head


def fit_layer(
    mechanism: Mechanism,
    q: Float[Tensor, "b h t d"],
    k: Float[Tensor, "b h_kv t d"],
    v: Float[Tensor, "b h_kv t dv"],
    target: Float[Tensor, "b h t dv"],
    options: FitOptions = FitOptions(),
    *,
    rotary: Angles | None = None,
    longer: Sequence[Seen] = (),
) -> Float[Tensor, " h"]:
    """Train the mechanism in place so that its output is near `target`; the held-out error of each head.

    Minimizes the sum over heads of |out - target|^2 / |target|^2 by Adam on random passages, and ends with the
    parameters that did best on the held-out ones. With `heldout=0` all passages are trained on and the error is theirs.
    `longer` are passages of other lengths to train on as well. A head of a hybrid whose features do not lower its error
    on the judging passages is left with sinks and window.
    """
    passages = q.shape[0]
    if options.heldout >= passages:
        raise AttngapError(
            f"A fit needs more passages than it holds out, got {passages} and heldout={options.heldout}; give more text"
        )
    batches = [Seen(q, k, v, target, rotary), *longer]
    horizon = options.horizon or max(each.q.shape[2] for each in batches)
    init_prototypes(
        mechanism, *_content(mechanism, batches), sharpness=options.sharpness, angles=rotary, horizon=horizon
    )
    train = passages - options.heldout
    judge = slice(train, None) if options.heldout else slice(None)
    generator = torch.Generator().manual_seed(options.seed)
    misfit = (
        _far_misfit(mechanism, batches, generator) if isinstance(mechanism, Hybrid) else _misfit(mechanism, batches)
    )

    if options.settle and isinstance(mechanism, Hybrid) and mechanism.log_gain is not None:
        _choose_gain_offsets(mechanism.log_gain, lambda: misfit(0, slice(min(train, OFFSET_PASSAGES))))
    best, best_error = copy.deepcopy(mechanism.state_dict()), _without_grad(misfit, judge)
    trained = [p for p in mechanism.parameters() if p.requires_grad]
    if trained and options.steps:
        optimizer = torch.optim.Adam(trained, lr=options.rate)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _one_cycle(step, options.steps))
        order = _batches([train, *(len(each.q) for each in longer)], options, generator)
        for step in range(1, options.steps + 1):
            optimizer.zero_grad()
            misfit(*next(order)).sum().backward()
            optimizer.step()
            schedule.step()
            if step % options.check == 0 or step == options.steps:
                error = _without_grad(misfit, judge)
                if error.sum() < best_error.sum():
                    best, best_error = copy.deepcopy(mechanism.state_dict()), error
        mechanism.load_state_dict(best)
        mechanism.zero_grad()
    if isinstance(mechanism, Hybrid) and mechanism.log_gain is not None:
        return _silence(mechanism, best_error, misfit, judge)
    return best_error


def _misfit(mechanism: Mechanism, batches: Sequence[Seen]) -> Misfit:
    """Of whole passages."""
    energy = [each.target.square().mean((0, 2, 3)).clamp(min=1e-12) for each in batches]  # (h,)

    def misfit(place: int, which: slice | Tensor) -> Float[Tensor, " h"]:
        each = batches[place].only(which)
        out, _ = mechanism.chunked(mechanism.read(None, each.q, each.k, each.v, rotary=each.rotary))
        return (out - each.target).square().mean((0, 2, 3)) / energy[place]

    return misfit


def _far_misfit(mechanism: Hybrid, batches: Sequence[Seen], generator: torch.Generator) -> Misfit:
    """Of some rows of each passage, others each time: the near part of all rows is computed once."""
    rows = [FarRows(mechanism, each.q, each.k, each.v, each.target, each.rotary) for each in batches]

    def misfit(place: int, which: slice | Tensor) -> Float[Tensor, " h"]:
        return rows[place].misfit(which, generator if torch.is_grad_enabled() else None)

    return misfit


def _batches(
    sizes: Sequence[int], options: FitOptions, generator: torch.Generator
) -> Iterator[tuple[int, Int[Tensor, " batch"]]]:
    """Passages in random order, all of them before any comes again; a batch is of one length."""
    left = [torch.empty(0, dtype=torch.long) for _ in sizes]
    while True:
        places = torch.tensor([place for place, size in enumerate(sizes) for _ in range(-(-size // options.batch))])
        for place in places[torch.randperm(len(places), generator=generator)].tolist():
            while len(left[place]) < min(options.batch, sizes[place]):
                left[place] = torch.cat((left[place], torch.randperm(sizes[place], generator=generator)))
            yield place, left[place][: options.batch]
            left[place] = left[place][options.batch :]


@torch.no_grad()
def _choose_gain_offsets(log_gain: Tensor, misfit: Callable[[], Float[Tensor, " h"]]) -> None:
    """Lower each head's gain to what fits best.

    Prototypes are means of queries, hence shorter than these, and overrate keys that a query shuns: heads that read
    little far away began with a far part many times too large, and most of the fit went into taking it back.
    """
    begun = log_gain.clone()
    errors = []
    for offset in GAIN_OFFSETS:
        log_gain.copy_(begun + offset)
        errors.append(misfit())
    log_gain.copy_(begun + log_gain.new_tensor(GAIN_OFFSETS)[torch.stack(errors).argmin(0)])


@torch.no_grad()
def _silence(mechanism: Hybrid, error: Tensor, misfit: Misfit, judge: slice) -> Float[Tensor, " h"]:
    """Leave sinks and window to the heads whose features do no good; the error of each head after that."""
    gain, weight = mechanism.log_gain, mechanism.gain_weight
    assert gain is not None
    held, slope = gain.clone(), None if weight is None else weight.clone()
    gain.fill_(SILENT)
    if weight is not None:
        weight.zero_()
    alone = misfit(0, judge)
    useful = error < alone
    gain.copy_(torch.where(useful, held, gain))
    if weight is not None and slope is not None:
        weight.copy_(torch.where(useful[:, None], slope, weight))
    return torch.minimum(error, alone)


def _without_grad(misfit: Misfit, which: slice) -> Float[Tensor, " h"]:
    with torch.no_grad():
        return misfit(0, which)


def _one_cycle(step: int, steps: int) -> float:
    """Up over the first fifth, then down to a hundredth."""
    done = step / steps
    return max(0.05, done / 0.2) if done < 0.2 else max(0.01, (1 - done) / 0.8)


@torch.no_grad()
def init_prototypes(
    mechanism: Mechanism,
    q: Float[Tensor, "b h t d"],
    k: Float[Tensor, "b h_kv t d"],
    *,
    sharpness: float,
    angles: Angles | None = None,
    horizon: int | None = None,
) -> None:
    """Start prototype features from queries and keys as these read them; other maps start where they were made.

    Each prototype is the center of a cluster of the group's queries, its key feature is divided by its mean over the
    keys (and multiplied back on the query side), and a query is a mixture of the prototypes close to it. Where features
    read turned-back queries and keys, `angles` tell how these turn, and a prototype is turned as far keys see it on
    average, over distances up to `horizon` at which its feature has not faded.
    """
    features = getattr(mechanism, "feature_map", None)
    if not isinstance(features, Prototype):
        return
    scale = mechanism.scale if isinstance(mechanism, Hybrid) else mechanism.dim**-0.5
    group = mechanism.heads // mechanism.kv_heads
    for place in range(mechanism.kv_heads):
        heads = slice(place * group, (place + 1) * group)
        queries = q[:, heads].transpose(0, 1).flatten(1, 2)  # (group, n, d)
        keys = k[:, place].flatten(0, 1)  # (n, d)
        centers = _centers(queries.flatten(0, 1), features.width)  # (r, d)
        seen = centers if angles is None else _on_average(mechanism, features, place, centers, angles, horizon)
        features.key_weight[place] = seen.mT * scale
        size = (keys @ seen.mT * scale).logsumexp(0) - torch.tensor(float(len(keys))).log()  # (r,)
        features.key_bias[place, 0] = -size
        spread = torch.cdist(queries, centers.expand(group, -1, -1)).square().amin(-1).mean(-1)  # (group,)
        sharp = sharpness / spread.clamp(min=1e-6)[:, None, None]  # (group, 1, 1)
        features.query_weight[heads] = sharp * centers.mT
        features.query_bias[heads] = -sharp / 2 * centers.square().sum(-1)
        features.query_scale[heads] = size - size.mean()
        if isinstance(mechanism, Hybrid) and mechanism.log_gain is not None:
            mechanism.log_gain[heads] = size.mean()


def _content(
    mechanism: Mechanism, batches: Sequence[Seen]
) -> tuple[Float[Tensor, "1 h n d"], Float[Tensor, "1 k n d"]]:
    """Queries and keys as features read them, of all passages in a row, evenly thinned where they are many."""
    found: list[tuple[Tensor, Tensor]] = []
    for each in batches:
        read = each[:2]
        if isinstance(mechanism, Hybrid):
            read = mechanism.content(each.q, each.rotary), mechanism.content(each.k, each.rotary)
        found.append((read[0].transpose(0, 1).flatten(1, 2), read[1].transpose(0, 1).flatten(1, 2)))
    q, k = (torch.cat(parts, 1)[None] for parts in zip(*found, strict=True))
    some = _even(q.shape[2], INIT_TOKENS)
    return q[:, :, some], k[:, :, some]


def _on_average(
    mechanism: Mechanism,
    features: Prototype,
    place: int,
    centers: Float[Tensor, "r d"],
    angles: Angles,
    horizon: int | None,
) -> Float[Tensor, "r d"]:
    """The prototypes as far keys see them."""
    if not isinstance(mechanism, Hybrid) or mechanism.rotary is None:
        return centers
    farthest = max(horizon or 0, 2 * mechanism.window)
    distance = torch.linspace(mechanism.window, farthest, DISTANCES, device=centers.device)
    rates = centers.new_zeros(features.width) if features.log_rate is None else features.rates()[place, 0]
    return mechanism.rotary.on_average(centers, angles, distance, (-rates[:, None] * distance).exp())


def _centers(points: Float[Tensor, "n d"], count: int) -> Float[Tensor, "r d"]:
    """Lloyd's algorithm from evenly spaced points: deterministic, a few rounds are plenty for a start."""
    points = points[_even(len(points), CLUSTER_SAMPLE)]
    centers = points[_even(len(points), count)]
    if len(centers) < count:  # fewer queries than prototypes: repeat them
        centers = centers.repeat(-(-count // len(centers)), 1)[:count]
    for _ in range(CLUSTER_ROUNDS):
        owner = torch.cdist(points, centers).argmin(1)
        members = torch.bincount(owner, minlength=count)[:, None]
        total = torch.zeros_like(centers).index_add_(0, owner, points)
        centers = torch.where(members > 0, total / members.clamp(min=1), centers)
    return centers


def _even(total: int, wanted: int) -> Int[Tensor, " n"]:
    return torch.linspace(0, total - 1, min(total, wanted)).long()
