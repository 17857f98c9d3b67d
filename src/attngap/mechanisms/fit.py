"""Fit a layer's replacement to the layer's own softmax outputs: features and gains of all its heads at once."""

import copy
import dataclasses
from collections.abc import Callable, Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attngap.errors import AttngapError
from attngap.mechanisms.base import Mechanism
from attngap.mechanisms.feature_maps import Prototype
from attngap.mechanisms.variants.hybrid import Hybrid
from attngap.ops.hybrid import Near

CLUSTER_ROUNDS = 5
CLUSTER_SAMPLE = 4096  # queries of a group that prototypes are looked for in
LIFTS = (0.0, -1.0, -2.0, -3.0, -4.5, -6.0, -9.0)  # of a head's first log-gain; at -9 there is hardly a far part
SETTLED_ON = 3  # passages that first gains are chosen on


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


QUICK = FitOptions(steps=16, check=16, sharpness=2.0, settle=False)


def fit_layer(
    mechanism: Mechanism,
    q: Float[Tensor, "b h t d"],
    k: Float[Tensor, "b h_kv t d"],
    v: Float[Tensor, "b h_kv t dv"],
    target: Float[Tensor, "b h t dv"],
    options: FitOptions = FitOptions(),
) -> Float[Tensor, " h"]:
    """Train the mechanism in place so that its output is near `target`; the held-out error of each head.

    Minimizes the sum over heads of |out - target|^2 / |target|^2 by Adam on random passages, and ends with the
    parameters that did best on the held-out ones. With `heldout=0` all passages are trained on and the error is theirs.
    """
    passages = q.shape[0]
    if options.heldout >= passages:
        raise AttngapError(
            f"A fit needs more passages than it holds out, got {passages} and heldout={options.heldout}; give more text"
        )
    begin(mechanism, q, k, sharpness=options.sharpness)
    train = passages - options.heldout
    judge = slice(train, None) if options.heldout else slice(None)
    energy = target.square().mean((0, 2, 3)).clamp(min=1e-12)  # (h,)

    near = mechanism.near(q, k, v) if isinstance(mechanism, Hybrid) else None  # the same in every step

    def misfit(which: slice | Tensor) -> Float[Tensor, " h"]:
        streams = mechanism.read(None, q[which], k[which], v[which])
        if isinstance(mechanism, Hybrid) and near is not None:
            _, out = mechanism.chunked(streams, near=Near(*(x[which] for x in near)))
        else:
            _, out = mechanism.chunked(streams)
        return (out - target[which]).square().mean((0, 2, 3)) / energy

    if options.settle and isinstance(mechanism, Hybrid) and mechanism.log_gain is not None:
        _settle(mechanism.log_gain, lambda: misfit(slice(min(train, SETTLED_ON))))
    trained = [p for p in mechanism.parameters() if p.requires_grad]
    best, best_error = copy.deepcopy(mechanism.state_dict()), _without_grad(misfit, judge)
    if not trained or not options.steps:
        return best_error
    optimizer = torch.optim.Adam(trained, lr=options.rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _one_cycle(step, options.steps))
    order = _batches(train, options)
    for step in range(1, options.steps + 1):
        optimizer.zero_grad()
        misfit(next(order)).sum().backward()
        optimizer.step()
        schedule.step()
        if step % options.check == 0 or step == options.steps:
            error = _without_grad(misfit, judge)
            if error.sum() < best_error.sum():
                best, best_error = copy.deepcopy(mechanism.state_dict()), error
    mechanism.load_state_dict(best)
    mechanism.zero_grad()
    return best_error


def _batches(passages: int, options: FitOptions) -> Iterator[Int[Tensor, " batch"]]:
    """Passages in random order, all of them before any comes again."""
    generator = torch.Generator().manual_seed(options.seed)
    left = torch.empty(0, dtype=torch.long)
    while True:
        while len(left) < options.batch:
            left = torch.cat((left, torch.randperm(passages, generator=generator)))
        yield left[: options.batch]
        left = left[options.batch :]


@torch.no_grad()
def _settle(log_gain: Tensor, misfit: Callable[[], Float[Tensor, " h"]]) -> None:
    """Lower each head's gain to what fits best.

    Prototypes are means of queries, hence shorter than these, and overrate keys that a query shuns: heads that read
    little far away began with a far part many times too large, and most of the fit went into taking it back.
    """
    begun = log_gain.clone()
    errors = []
    for lift in LIFTS:
        log_gain.copy_(begun + lift)
        errors.append(misfit())
    log_gain.copy_(begun + log_gain.new_tensor(LIFTS)[torch.stack(errors).argmin(0)])


def _without_grad(misfit, which) -> Float[Tensor, " h"]:
    with torch.no_grad():
        return misfit(which)


def _one_cycle(step: int, steps: int) -> float:
    """Up over the first fifth, then down to a hundredth."""
    done = step / steps
    return max(0.05, done / 0.2) if done < 0.2 else max(0.01, (1 - done) / 0.8)


@torch.no_grad()
def begin(
    mechanism: Mechanism, q: Float[Tensor, "b h t d"], k: Float[Tensor, "b h_kv t d"], *, sharpness: float
) -> None:
    """Start prototype features from the queries of the data; other maps start where they were made.

    Each prototype is the center of a cluster of the group's queries, its key feature is divided by its mean over the
    keys (and multiplied back on the query side), and a query is a mixture of the prototypes close to it.
    """
    features = getattr(mechanism, "feature_map", None)
    if not isinstance(features, Prototype):
        return
    scale = mechanism.scale if isinstance(mechanism, Hybrid) else mechanism.dim**-0.5
    group = mechanism.heads // mechanism.kv_heads
    for place in range(mechanism.kv_heads):
        heads = slice(place * group, (place + 1) * group)
        queries = q[:, heads].transpose(0, 1).flatten(1, 2)  # (group, b t, d)
        centers = _centers(queries.flatten(0, 1), features.width)  # (r, d)
        features.key_weight[place] = centers.mT * scale
        size = (k[:, place].flatten(0, 1) @ centers.mT * scale).logsumexp(0) - _log_count(k)  # (r,)
        features.key_bias[place, 0] = -size
        spread = torch.cdist(queries, centers.expand(group, -1, -1)).square().amin(-1).mean(-1)  # (group,)
        sharp = sharpness / spread.clamp(min=1e-6)[:, None, None]  # (group, 1, 1)
        features.query_weight[heads] = sharp * centers.mT
        features.query_bias[heads] = -sharp / 2 * centers.square().sum(-1)
        features.query_scale[heads] = size - size.mean()
        if isinstance(mechanism, Hybrid) and mechanism.log_gain is not None:
            mechanism.log_gain[heads] = size.mean()


def _log_count(k: Tensor) -> float:
    return float(torch.tensor(k.shape[0] * k.shape[2], dtype=torch.float32).log())


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
