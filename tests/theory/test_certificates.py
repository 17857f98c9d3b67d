"""Floor, ceiling, selection and retrieval against brute force and known cases, each with a case that must fail."""

import math

import pytest
import torch

from attngap.errors import AttngapError
from attngap.theory import blocks
from attngap.theory.certificates import ceiling, crosstalk, floor, retrieval, selection
from attngap.theory.checks.rank import largest_rank
from attngap.theory.recurrences import RECURRENCES, causal_softmax


def random_head(n, spread=3.0, seed=0):
    return causal_softmax(n, spread, torch.Generator().manual_seed(seed))


def previous_token(n):
    head = torch.diag(torch.ones(n - 1, dtype=torch.float64), -1)
    head[0, 0] = 1.0
    return head


def running_mean(n):
    return torch.ones(n, n, dtype=torch.float64).tril() / torch.arange(1, n + 1)[:, None]


def copy_head(half):
    """Rows of the second half read the first half in order."""
    head = torch.eye(2 * half, dtype=torch.float64)
    head[half:] = torch.eye(half, 2 * half, dtype=torch.float64)
    return head


def fitted_recurrence(target, rank, steps=1500, starts=3):
    """The least error Adam finds over S_i = M_i S_{i-1} + k_i e_i^T, o_i = q_i S_i: an upper bound on the best."""
    n = len(target)
    best = math.inf
    for seed in range(starts):
        generator = torch.Generator().manual_seed(seed)
        q, k = (torch.randn(n, rank, generator=generator, dtype=torch.float64) for _ in range(2))
        gates = torch.eye(rank, dtype=torch.float64).repeat(n, 1, 1)
        gates += 0.1 * torch.randn(n, rank, rank, generator=generator, dtype=torch.float64)
        free = [x.requires_grad_() for x in (q, k, gates)]
        optimizer = torch.optim.Adam(free, lr=0.03)
        for _ in range(steps):
            columns = torch.zeros(rank, 0, dtype=torch.float64)
            rows = []
            for i in range(n):
                columns = torch.cat([gates[i] @ columns, k[i, :, None]], 1)
                rows.append(torch.nn.functional.pad(q[i] @ columns, (0, n - 1 - i)))
            error = (torch.stack(rows) - target).square().sum()
            best = min(best, error.item())
            optimizer.zero_grad()
            error.backward()
            optimizer.step()
    return best


@pytest.mark.parametrize(("rank", "seed"), [(1, 0), (2, 1)])
def test_floor_and_ceiling_enclose_what_optimization_finds(rank, seed):
    target = random_head(8, seed=seed)
    low, high = floor(target, rank, cells=8).value.item(), ceiling(target, rank, stride=1).value.item()
    found = fitted_recurrence(target, rank, steps=250, starts=1)
    assert low <= found
    assert low <= high
    assert low > 0.3 * found  # not vacuous


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_floor_and_ceiling_enclose_a_long_optimization(rank):
    target = random_head(12, seed=rank)
    low, high = floor(target, rank, cells=12).value.item(), ceiling(target, rank, stride=1).value.item()
    found = fitted_recurrence(target, rank)
    assert low <= found <= 1.02 * high


def test_known_cases():
    # The row that reads t - 1 and the next, which reads t, both lie in the block at t: two numbers of state, no fewer.
    assert floor(previous_token(32), 2, cells=32).value.item() == 0.0
    assert ceiling(previous_token(32), 2).value.item() < 1e-24
    assert floor(previous_token(32), 1, cells=32).value.item() > 1.0
    assert floor(previous_token(32), 1, window=2).value.item() == 0.0
    assert floor(running_mean(32), 1, cells=32).value.item() == 0.0
    assert ceiling(running_mean(32), 1).value.item() < 1e-24
    for rank in (1, 4, 12):
        assert floor(copy_head(16), rank, cells=32).value.item() == pytest.approx(16 - rank, abs=1.0)
        assert floor(copy_head(16), rank, cells=32).value.item() <= ceiling(copy_head(16), rank).value.item() + 1e-9


def test_global_truncation_is_no_floor_for_causal_weights():
    mean = running_mean(24)
    claimed = floor(mean, 1, causal=False).value.item()
    achieved = ceiling(mean, 1).value.item()
    assert claimed > 0.5
    assert achieved < 1e-20  # a linear attention of rank 1 is exact, so the claim would be wrong


@pytest.mark.parametrize("name", [name for name, (rank, _) in RECURRENCES.items() if rank(4) == 4])
def test_floor_of_a_linear_attention_is_zero_at_its_rank_and_not_below(name):
    made = RECURRENCES[name][1](30, 4, torch.Generator().manual_seed(0))
    at, below = floor(made, [4, 2], cells=30).relative
    assert at.item() < 1e-12
    assert below.item() > 5e-4


@pytest.mark.parametrize(("rank", "stride"), [(1, 1), (2, 1), (2, 2), (5, 1), (5, 3), (8, 8)])
@pytest.mark.parametrize(("window", "sinks"), [(0, 0), (3, 2)])
def test_ceiling_obeys_the_rank_at_every_cut(rank, stride, window, sinks):
    target = random_head(20)
    built = ceiling(target, rank, window, sinks, stride=stride)
    row, key = torch.meshgrid(torch.arange(20), torch.arange(20), indexing="ij")
    near = (row - key < window) | (key < sinks)
    assert torch.equal(built.weights[near], target[near])
    assert (built.weights - target).square().sum().item() == pytest.approx(built.value.item(), rel=1e-12)
    far = built.weights.masked_fill(near, 0.0)[sinks + window :, sinks : 20 - window]
    assert largest_rank(far.tril()) <= rank
    if rank < 8:
        assert largest_rank(target[sinks + window :, sinks : 20 - window].tril()) > rank  # the test can fail


def test_sum_of_tails_bounds_the_sweep():
    for seed in range(5):
        target = random_head(20, seed=seed)
        for rank in (1, 3, 6):
            tails = sum(torch.linalg.svdvals(target[t:, : t + 1])[rank:].square().sum() for t in range(20))
            assert ceiling(target, rank, stride=1).value <= tails + 1e-12


def test_many_ranks_and_heads_at_once_equal_one_at_a_time():
    heads = torch.stack([random_head(26, seed=s) for s in range(4)]).reshape(2, 2, 26, 26)
    ranks = [1, 3, 7]
    low, high = floor(heads, ranks, 2, 1), ceiling(heads, ranks, 2, 1, stride=1)
    assert low.value.shape == high.value.shape == (2, 2, 3)
    assert high.weights.shape == (2, 2, 3, 26, 26)
    for j, rank in enumerate(ranks):
        one = floor(heads[1, 0], rank, 2, 1)
        assert low.value[1, 0, j].item() == pytest.approx(one.value.item(), rel=1e-12)
        alone = ceiling(heads[1, 0], rank, 2, 1, stride=1)
        assert torch.allclose(alone.weights, high.weights[1, 0, j], atol=1e-9)
    assert (low.value <= high.value).all()
    assert torch.allclose(low.relative * low.far[..., None], low.value)
    assert torch.allclose(low.of_whole * low.whole[..., None], low.value)


def test_fewer_cuts_give_a_smaller_floor_and_say_so():
    target = random_head(40)
    full = floor(target, 2, cells=40)
    assert full.exact
    assert full.cuts == full.possible == 40
    for cells in (2, 4, (6, 4)):
        coarse = floor(target, 2, cells=cells)
        assert 0.5 * full.value < coarse.value <= full.value + 1e-12
        assert not coarse.exact
        assert coarse.cuts < coarse.possible


def test_floor_symmetries():
    target = random_head(24)
    full = floor(target, 2, cells=24).value.item()
    mirrored = target.flip(0, 1).mT.contiguous()  # reversing time and swapping roles keeps blocks blocks
    assert floor(mirrored, 2, cells=24).value.item() == pytest.approx(full, rel=1e-10)
    assert floor(3 * target, 2, cells=24).value.item() == pytest.approx(9 * full, rel=1e-10)
    order = torch.randperm(24)
    free = floor(target, 2, causal=False).value.item()
    assert floor(target[order][:, order], 2, causal=False).value.item() == pytest.approx(free, rel=1e-10)
    # Negative control: shuffling causal rows is not a symmetry of the causal floor.
    shuffled = target.clone()
    shuffled[12:] = target[12:].masked_fill(torch.arange(24) >= 12, 0.0)[torch.randperm(12)]
    assert floor(shuffled, 2, cells=24).value.item() != pytest.approx(full, rel=1e-3)


def test_tails_never_exceed_the_true_ones():
    generator = torch.Generator().manual_seed(0)
    low_rank = torch.randn(60, 5, generator=generator, dtype=torch.float64) @ torch.randn(
        5, 40, generator=generator, dtype=torch.float64
    )
    assert blocks.tails(low_rank[None], [5])[0, 0].item() == 0.0  # rounding is taken off, not added
    noisy = low_rank + 1e-3 * torch.randn(60, 40, generator=generator, dtype=torch.float64)
    true = torch.linalg.svdvals(noisy)[5:].square().sum().item()
    got = blocks.tails(noisy[None], [5])[0, 0].item()
    assert got <= true
    assert got == pytest.approx(true, rel=1e-4)


def test_bidirectional_is_eckart_young():
    target = torch.rand(12, 12, dtype=torch.float64)
    true = torch.linalg.svdvals(target)[3:].square().sum().item()
    assert floor(target, 3, causal=False).value.item() == pytest.approx(true, rel=1e-10)
    assert ceiling(target, 3, causal=False).value.item() == pytest.approx(true, rel=1e-10)


def test_nothing_is_left_when_everything_is_near():
    target = random_head(10)
    for window, sinks in ((10, 0), (8, 2), (3, 9), (20, 0)):
        low, high = floor(target, 2, window, sinks), ceiling(target, 2, window, sinks)
        assert low.value.item() == high.value.item() == low.relative.item() == 0.0
        assert torch.equal(high.weights, target)


def test_selection_identity_and_invariances():
    logits = torch.randn(3, 16, 50, dtype=torch.float64) * 5
    found = selection(logits)
    top = logits.softmax(-1).amax(-1)
    assert torch.allclose(1 / (1 + 49 * (-found.margin).exp()), top, atol=1e-12, rtol=1e-12)
    assert torch.allclose(found.mass, top, atol=1e-12)
    assert torch.equal(found.kappa >= 1, top >= 0.5)
    order = torch.randperm(50)
    for same in (selection(logits + 7.0), selection(logits[..., order]), selection(logits.softmax(-1).log())):
        assert torch.allclose(same.margin, found.margin, atol=1e-9)
    assert not torch.allclose(selection(2 * logits).margin, found.margin)
    assert torch.allclose(found.n_star, 1 + found.margin.exp())


def test_selection_of_masked_rows_and_groups():
    logits = torch.randn(8, 8, dtype=torch.float64)
    causal = torch.ones(8, 8, dtype=torch.bool).tril()
    masked, cut = selection(logits, causal), selection(logits.masked_fill(~causal, -math.inf))
    assert torch.equal(masked.keys, torch.arange(1, 9))
    assert torch.allclose(masked.margin, cut.margin, equal_nan=True)
    assert masked.kappa[:2].isnan().all()  # one or two keys: nothing to select among
    assert masked.kappa[2:].isfinite().all()
    pair = selection(logits, top=2)
    expected = logits.softmax(-1).topk(2).values.sum(-1)
    assert torch.allclose(1 / (1 + 3 * (-pair.margin).exp()), expected, atol=1e-12)
    summary = selection(torch.tensor([[9.0, 0, 0, 0], [0, 0, 9.0, 0]]), sinks=1).summary()
    assert summary["rows"].item() == 1
    assert summary["sink_share"].item() == 0.5
    assert summary["selecting"].item() == 1.0


def test_retrieval_bounds_hold_and_are_tight():
    head = copy_head(8)
    targets = [-1] * 8 + list(range(8))
    found = retrieval(head, targets)
    assert found.mass.max().item() == 8.0
    assert found.variation(2).item() == pytest.approx(0.75)
    assert found.crosstalk.item() == 0.0
    assert found.least_crosstalk(2) == 3.0
    # A head of rank 2 that answers with one of two keys: it attains T = 2 and a mean variation of 3/4.
    cheap = head.clone()
    cheap[8:] = 0.0
    cheap[range(8, 16), [0, 0, 0, 0, 4, 4, 4, 4]] = 1.0
    reached = retrieval(cheap, targets)
    assert reached.mass[7:9].max().item() == 2.0
    variation = (head[8:] - cheap[8:]).clamp(min=0).sum(-1).mean().item()
    assert variation == pytest.approx(found.variation(2).item())
    # Without positivity the mass may exceed the rank: the reason R1 asks for it.
    signed = torch.outer(torch.ones(8), torch.ones(8)).double()
    assert signed.trace() > torch.linalg.matrix_rank(signed)


def test_retrieval_ignores_order_and_heads():
    heads = torch.stack([random_head(20, seed=s) for s in range(3)])
    targets = torch.tensor([-1] * 10 + [3, 1, 4, 1, 5, 9, 2, 6, 5, 3])
    found = retrieval(heads, targets)
    assert found.mass.shape == (3, 20)
    assert torch.equal(retrieval(heads.flip(0), targets).mass, found.mass.flip(0))
    assert found.targets[10] == 7
    expected = sum(heads[0, targets.eq(j).nonzero()[:, 0], j].mean() for j in (1, 2, 3, 4, 5, 6, 9))
    assert found.mass[0, 10].item() == pytest.approx(expected.item(), rel=1e-12)
    both = retrieval(torch.eye(6, dtype=torch.float64).flip(0), range(5, -1, -1), causal=False)
    assert both.variation(2).item() == pytest.approx(4 / 6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a: floor(a, 9), "floor: rank must be 1 to 8, the number of tokens, got 9"),
        (lambda a: floor(a, [2, 0]), r"floor: rank must be 1 to 8, the number of tokens, got \[2, 0\]"),
        (lambda a: ceiling(a, 2, stride=3), r"ceiling: stride must be 1 to the rank \(2\), got 3"),
        (lambda a: floor(a, 2, cells=1), "floor: cells must be at least 2 at every level, got 1"),
        (lambda a: floor(a, 2, -1), "floor: window and sinks must not be negative, got window=-1, sinks=0"),
        (lambda a: floor(a, 2, 1, causal=False), "floor: window and sinks need causal=True"),
        (lambda a: floor(a / 0, 2), "floor: weights must be finite, got"),
        (lambda a: floor(a.mT, 2), "floor: causal weights must be zero above the diagonal"),
        (lambda a: retrieval(2 * a, [0] * 8), "retrieval: weights must be nonnegative with rows summing to at most 1"),
        (lambda a: retrieval(-a, [0] * 8), "got a smallest entry of -1"),
        (lambda a: retrieval(a, [0] * 7), r"targets needs one entry per row, 8, got shape \(7,\)"),
        (lambda a: retrieval(a, [3] + [0] * 7), "a target must be -1 .no query. to its row's index, got 3 for row 0"),
        (lambda a: crosstalk(a, [-1] * 8), "crosstalk: no row is a query"),
        (lambda a: selection(a * float("nan")), "selection: logits must not be NaN or"),
        (lambda a: selection(a, top=8), r"selection: top must be 1 to 7 \(one less than the keys\), got 8"),
    ],
)
def test_bad_weights_are_refused_in_one_line(call, message):
    with pytest.raises(AttngapError, match=message) as caught:
        call(running_mean(8))
    assert "\n" not in str(caught.value)
