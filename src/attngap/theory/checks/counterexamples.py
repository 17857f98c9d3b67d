"""Counterexamples to tempting statements. Each line says what its example shows, never the statement itself."""

import math

import torch

from attngap.theory.rank_bounds import ceiling, floor, weighted_floor
from attngap.theory.recurrences import causal_softmax
from attngap.theory.separation import law
from attngap.theory.statements import Statement, require


def running_mean() -> str:
    n = 16
    mean = torch.ones(n, n, dtype=torch.float64).tril() / torch.arange(1, n + 1)[:, None]
    whole = torch.linalg.svdvals(mean)[1:].square().sum().item()
    rank = int(torch.linalg.matrix_rank(mean))
    built = ceiling(mean, 1).value.item()
    require(rank == n and whole > 0.1 and built < 1e-20, f"rank {rank}, tail {whole}, built {built}")
    bound = floor(mean, 1, cells=n).value.item()
    require(bound < 1e-12, f"the block floor is {bound}")
    return (
        f"running mean, n = {n}: full rank, tail {whole:.2f} beyond 1, yet a state of rank 1 is exact, floor {bound:g}"
    )


def circle() -> str:
    count = 200
    angle = torch.arange(count, dtype=torch.float64) * (2 * math.pi / count)
    features = torch.stack([torch.ones(count, dtype=torch.float64), angle.cos(), angle.sin()], 1)
    scores = features @ features.mT
    right = int((scores.argmax(-1) == torch.arange(count)).sum())
    rank = int(torch.linalg.matrix_rank(scores, rtol=1e-9))
    require(rank == 3 and right == count and scores.min().item() >= -1e-12, f"rank {rank}, {right} of {count}")
    return f"nonnegative weights of rank 3 recall {right} of {count} items by argmax"


def tilted_weight() -> str:
    options = {"n": 2**20, "d": 514, "a0": 0.05, "a1": 0.7, "b": 0.5, "m": 40}
    plain, tilted, softmax = (law(kernel, **options).success for kernel in ("linear", ("tilted", 2.0), "softmax"))
    require(plain < 1e-6 and tilted > 0.99 and softmax > 0.999, f"{plain}, {tilted}, {softmax}")
    return f"linear with X_E separates with {tilted:.3f}, where X = 11^T gives {plain:.0f} and softmax {softmax:.3f}"


def outputs_attained() -> str:
    n, width = 20, 4
    generator = torch.Generator().manual_seed(0)
    weights = causal_softmax(n, 3.0, generator)
    value = torch.randn(n, width, generator=generator, dtype=torch.float64)
    key = torch.randn(n, width, generator=generator, dtype=torch.float64)
    state = torch.zeros(width, width, dtype=torch.float64)
    worst = 0.0
    for i in range(n):
        state = state + torch.outer(key[i], value[i])
        wanted = weights[i] @ value
        query = torch.linalg.lstsq(state.mT, wanted[:, None], driver="gelsd").solution[:, 0]
        worst = max(worst, (query @ state - wanted).abs().max().item())
    bound = floor(weights, width, cells=n).value.item()
    require(worst < 1e-9 and bound > 0.1, f"output error {worst}, floor on weights {bound}")
    return f"for fixed V and r = d_v the outputs are matched to {worst:.0e}, though the weights' floor is {bound:.2f}"


def truncated_svd() -> str:
    generator = torch.Generator().manual_seed(1)
    block = causal_softmax(64, 1.0, generator)[32:, :33]
    sketch = torch.linalg.qr(block @ torch.randn(33, 8, generator=generator, dtype=torch.float64)).Q
    claimed = (block.square().sum() - (sketch.mT @ block).square().sum()).item()
    true = torch.linalg.svdvals(block)[8:].square().sum().item()
    require(claimed > 1.05 * true, f"claimed {claimed}, true {true}")
    return f"a randomized SVD gives a tail of {claimed:.4f} where the true one is {true:.4f}: not a lower bound"


def _unread_head() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A head's weights, its values, and the one direction in which the next layer reads: no value has any of it."""
    generator = torch.Generator().manual_seed(2)
    n, width = 24, 4
    head = causal_softmax(n, 4.0, generator)
    value = torch.randn(n, width, generator=generator, dtype=torch.float64)
    project = torch.randn(width, 1, generator=generator, dtype=torch.float64)
    return head, value - value @ project @ project.mT / project.square().sum(), project


def head_without_effect() -> str:
    head, value, project = _unread_head()
    built = ceiling(head, 1)
    assert built.weights is not None
    change = ((head - built.weights) @ value @ project).abs().max().item()
    bound = floor(head, 1).value.item()
    require(bound > 0.5 and change < 1e-12, f"floor {bound}, change {change}")
    return f"a head with a floor of {bound:.1f} is replaced and the network's output moves by {change:.0e}"


def pair_weights() -> str:
    n = 16
    mean = torch.ones(n, n, dtype=torch.float64).tril() / torch.arange(1, n + 1)[:, None]  # a state of rank 1 is exact
    pairs = torch.rand(n, n, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    claimed = floor(pairs * mean, 1, cells=n).value.item()
    product = weighted_floor(mean, pairs[:, 0], pairs[0], 1, cells=n).value.item()
    require(claimed > 0.01 and product < 1e-12, f"tails of weighted pairs {claimed}, of rows and columns {product}")
    return f"the running mean is exact at rank 1; weighted by pairs its tails are {claimed:.2f}, by rows and columns 0"


def weighted_head_without_effect() -> str:
    head, value, project = _unread_head()
    gradient = project.norm().expand(len(head))  # of any row: the reader's own direction
    columns = (value - value.mean(0)).norm(dim=-1)
    bound = weighted_floor(head, gradient, columns, 1).value.item()
    built = ceiling(head, 1)
    assert built.weights is not None
    change = ((head - built.weights) @ value @ project).abs().max().item()
    require(bound > 0.5 and change < 1e-12, f"weighted floor {bound}, change {change}")
    return f"gradients and values are large, the weighted floor is {bound:.1f}, and the output moves by {change:.0e}"


COUNTEREXAMPLES = (
    Statement("6.1", "a full-rank causal matrix can need one number of state", running_mean),
    Statement("6.2", "three features can recall two hundred items by argmax", circle),
    Statement("6.3", "some linear attention separates D0 from D1", tilted_weight),
    Statement("6.4", "outputs for fixed V can be matched exactly once r = d_v", outputs_attained),
    Statement("6.5", "a randomized SVD overstates the tail, so ours uses every eigenvalue", truncated_svd),
    Statement("6.6", "a head's floor says nothing about a network that does not read it", head_without_effect),
    Statement("6.7", "weights of pairs that are no product of rows and columns give no floor", pair_weights),
    Statement("6.8", "a weighted floor can be large where replacing costs nothing", weighted_head_without_effect),
)
