"""Hybrid attention against its definition, in any pieces, with padding, beams, strong gains and every dtype."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attngap.errors import AttngapError
from attngap.ops.hybrid import blocks, definition, empty_state, hybrid_attention, near_attention, window_attention
from attngap.ops.softmax import definition as softmax_definition

pytestmark = pytest.mark.usefixtures("both_ways")

NAMES = ("q", "k", "v", "fq", "fk", "log_gain")


def make(b=2, h=4, kv=2, t=37, d=6, dv=5, r=7, *, dtype=torch.float64, signed=False, seed=0):
    """q, k, v, fq, fk, log_gain; features positive unless signed."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*size):
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    fq, fk = draw(b, h, t, r), draw(b, kv, t, r)
    if not signed:
        fq, fk = fq.exp(), fk.exp()
    found = (2 * draw(b, h, t, d), draw(b, kv, t, d), draw(b, kv, t, dv), fq, fk, draw(b, h, t))
    return tuple(x.to(dtype) for x in found)


def fast(inputs, **options):
    *rest, gain = inputs
    return hybrid_attention(*rest, log_gain=gain, **options)


def slow(inputs, **options):
    *rest, gain = inputs
    return definition.hybrid_attention(*rest, log_gain=gain, **options)


def cut(inputs, start, stop):
    return tuple(x[:, :, start:stop] for x in inputs)


def close(x, y, tolerance=1e-10):
    torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("kv", [1, 4])
@pytest.mark.parametrize(
    ("t", "window", "sinks", "chunk"),
    [(1, 4, 4, 8), (2, 64, 0, None), (37, 1, 0, 5), (37, 8, 4, 8), (37, 5, 1, 16), (37, 8, 3, 1), (37, 64, 4, 16),
     (37, 8, 40, 8), (130, 16, 4, None)],
)  # fmt: skip
def test_values_and_gradients_equal_the_definition(t, window, sinks, chunk, kv, relative):
    inputs = [x.requires_grad_() for x in make(t=t, kv=kv)]
    expected = slow(inputs, window=window, sinks=sinks, relative=relative)
    grad = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, inputs, grad)
    for size in {chunk, None}:  # the compiled form has blocks of its own
        out, _ = fast(inputs, window=window, sinks=sinks, chunk=size, relative=relative)
        close(out, expected)
        for name, ours, theirs in zip(NAMES, torch.autograd.grad(out, inputs, grad), wanted, strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-9), name


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_shape_in_any_pieces_equals_the_definition(data):
    """Values and gradients of a padded batch that is fed in pieces."""

    def draw(*choices):
        return data.draw(st.sampled_from(choices))

    kv, window, sinks = draw(1, 2), draw(1, 3, 8, 11, 16, 33), draw(0, 1, 4, 18)
    shape = {"b": draw(1, 2), "kv": kv, "h": kv * draw(1, 3), "d": draw(1, 5, 16), "dv": draw(1, 7, 24)}
    inputs = [x.requires_grad_() for x in make(**shape, t=draw(1, 20, 47), r=draw(1, 6, 17), seed=draw(*range(9)))]
    t, options = inputs[0].shape[2], {"window": window, "sinks": sinks, "relative": draw(True, False)}
    mask = torch.rand(shape["b"], t, generator=torch.Generator().manual_seed(draw(1, 2))) < draw(0.6, 2.0)
    mask[:, 0] = True
    edge = draw(0, t // 3, t - 1)
    state, parts = None, []
    for start, stop in ((0, edge), (edge, t)):
        if start < stop:
            part, state = fast(cut(inputs, start, stop), state=state, mask=mask[:, start:stop], **options)
            parts.append(part)
    out, expected = torch.cat(parts, 2), slow(inputs, mask=mask, **options)
    expected = expected * mask[:, None, :, None]
    close(out, expected, 1e-9)
    grad = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(0))
    wanted = torch.autograd.grad(expected, inputs, grad, allow_unused=True)
    for name, ours, theirs in zip(NAMES, torch.autograd.grad(out, inputs, grad), wanted, strict=True):
        theirs = torch.zeros_like(ours) if theirs is None else theirs
        assert torch.allclose(ours, theirs, rtol=1e-8, atol=1e-8), name


def test_very_small_near_weights_without_far_mass_give_the_true_result():
    """The largest near logit is -200: beyond what exp can hold, and yet the weights are those of a softmax."""
    t = 6
    q, k = torch.full((1, 1, t, 1), -10.0), torch.full((1, 1, t, 1), 20.0)
    v, features = torch.arange(float(t)).view(1, 1, t, 1), torch.full((1, 1, t, 4), 1e4)
    for count in (1, t):  # alone, and where there is no far key yet
        out, _ = hybrid_attention(*(x[:, :, :count] for x in (q, k, v, features, features)), window=8, scale=1.0)
        torch.testing.assert_close(out[0, 0, :, 0], torch.arange(float(count)) / 2)
    out, _ = hybrid_attention(q, k, v, 0 * features, features, window=1, sinks=0, scale=1.0)
    torch.testing.assert_close(out, v)


def test_an_infinite_gradient_in_one_sequence_leaves_the_others_alone():
    inputs = [x.requires_grad_() for x in make(b=3, t=40)]
    out, _ = fast(inputs, window=8)
    grad = torch.randn_like(out)
    clean = torch.autograd.grad(out, inputs, grad, retain_graph=True)
    grad[0, 0, 5, 0] = torch.inf
    for x, y in zip(torch.autograd.grad(out, inputs, grad), clean, strict=True):
        assert torch.equal(x[1:], y[1:])


def test_signed_features_and_a_normalizer_near_zero_follow_the_stated_rule():
    inputs = make(t=30, signed=True)
    close(fast(inputs, window=4, sinks=2)[0], slow(inputs, window=4, sinks=2), 1e-8)
    # One near weight of 1 and one far weight of -1 + 1e-9: the normalizer 1e-9 becomes 1e-6.
    one = torch.ones(1, 1, 2, 1, dtype=torch.float64)
    v = torch.tensor([0.0, 1.0], dtype=torch.float64).view(1, 1, 2, 1)
    fk = torch.full_like(one, -1 + 1e-9)
    leaves = [x.clone().requires_grad_() for x in (0 * one, one, v, one, fk)]
    out, _ = hybrid_attention(*leaves, window=1, sinks=0)
    expected = definition.hybrid_attention(*leaves, window=1, sinks=0)
    assert out[0, 0, 1, 0].item() == pytest.approx(1e6)
    close(out, expected)
    for ours, theirs in zip(
        torch.autograd.grad(out.sum(), leaves), torch.autograd.grad(expected.sum(), leaves), strict=True
    ):
        close(ours, theirs)


@pytest.mark.parametrize("relative", [False, True])
def test_gradcheck(relative):
    inputs = tuple(x.requires_grad_() for x in make(b=1, h=2, kv=1, t=6, d=2, dv=1, r=2))
    past = make(b=1, h=2, kv=1, t=5, d=2, dv=1, r=2, seed=1)
    state = fast(past, window=3, sinks=1)[1]
    names = ("k", "v", "fk", "S", "z")
    carried = tuple(state[name].clone().requires_grad_() for name in names)

    def run(*tensors):
        given = dict(zip(names, tensors[6:], strict=True)) | {"count": state["count"]}
        out, after = fast(tensors[:6], window=3, sinks=1, chunk=2, relative=relative, state=given)
        return out, after["S"], after["z"], after["k"]

    assert torch.autograd.gradcheck(run, inputs + carried)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_pieces_with_any_padding_give_the_whole(data):
    t = data.draw(st.integers(1, 40), "t")
    window, sinks = data.draw(st.integers(1, 12), "window"), data.draw(st.integers(0, 5), "sinks")
    relative, graded = data.draw(st.booleans(), "relative"), data.draw(st.booleans(), "graded")
    inputs = [x.requires_grad_(graded) for x in make(b=3, t=t, kv=data.draw(st.sampled_from((1, 2, 4)), "kv"))]
    padding = data.draw(st.sampled_from(("none", "left", "right", "anywhere")), "padding")
    lengths = torch.tensor(data.draw(st.lists(st.integers(1, t), min_size=3, max_size=3), "lengths"))[:, None]
    index = torch.arange(t)
    mask = {
        "none": None,
        "left": index >= t - lengths,
        "right": index < lengths,
        "anywhere": (index * 7919 + lengths) % 5 > 1,
    }[padding]
    expected = slow(inputs, window=window, sinks=sinks, relative=relative, mask=mask)
    state, outs, at = None, [], 0
    while at < t:
        stop = min(t, at + data.draw(st.sampled_from((1, 1, 2, 7, 19)), "size"))
        out, state = fast(
            cut(inputs, at, stop),
            window=window,
            sinks=sinks,
            relative=relative,
            mask=None if mask is None else mask[:, at:stop],
            chunk=data.draw(st.sampled_from((1, 3, 8, None)), "chunk"),
            state=state,
            inplace=not graded and data.draw(st.booleans(), "inplace"),
        )
        outs.append(out)
        at = stop
    out = torch.cat(outs, 2)
    close(out, expected)
    if out.requires_grad:
        grad = torch.randn_like(out)
        ours, theirs = torch.autograd.grad(out, inputs, grad), torch.autograd.grad(expected, inputs, grad)
        for x, y in zip(ours, theirs, strict=True):
            close(x, y, 1e-9)


def test_left_padding_equals_the_unpadded_sequence_even_when_the_padding_holds_nan():
    inputs = make(b=1, t=20)
    padded = tuple(torch.cat((x[:, :, :6] * torch.nan, x), 2) for x in inputs)
    mask = (torch.arange(26) >= 6)[None]
    alone, state = fast(inputs, window=5, sinks=2)
    out, other = fast(padded, window=5, sinks=2, mask=mask)
    close(out[:, :, 6:], alone)
    assert not out[:, :, :6].any()
    for name in state:
        close(state[name], other[name])


def test_decoding_after_a_ragged_prefill_and_a_reordering_of_beams():
    inputs = make(b=3, t=30)
    mask = torch.arange(20) >= torch.tensor([0, 13, 4])[:, None]
    _, state = fast(cut(inputs, 0, 20), window=4, sinks=2, mask=mask)
    assert state["count"].tolist() == [20, 7, 16]
    order = torch.tensor([2, 2, 1])
    state = {name: x.index_select(0, order) for name, x in state.items()}
    inputs = tuple(x[order] for x in inputs)
    full = torch.cat((mask, torch.ones(3, 10, dtype=torch.bool)), 1)[order]
    expected = slow(inputs, window=4, sinks=2, mask=full)
    for i in range(20, 30):
        out, state = fast(cut(inputs, i, i + 1), window=4, sinks=2, state=state, inplace=True)
        close(out, expected[:, :, i : i + 1])


def test_the_state_has_constant_size_and_is_left_alone_unless_asked():
    inputs = make(t=60)
    _, short = fast(cut(inputs, 0, 3), window=8)
    _, long = fast(inputs, window=8)
    assert {n: x.shape for n, x in short.items()} == {n: x.shape for n, x in long.items()}
    assert {n: x.shape for n, x in empty_state(*inputs[1:3], inputs[4], 8, 4).items()} == {
        n: x.shape for n, x in long.items()
    }
    before = {name: x.clone() for name, x in long.items()}
    first, _ = fast(cut(inputs, 0, 1), window=8, state=long)
    again, _ = fast(cut(inputs, 0, 1), window=8, state=long)
    assert torch.equal(first, again)
    assert all(torch.equal(before[name], long[name]) for name in long)
    _, after = fast(cut(inputs, 0, 1), window=8, state=long, inplace=True)
    assert after["S"].data_ptr() == long["S"].data_ptr()


def test_gain_forms_and_gradients_through_each():
    inputs = make(t=25)
    per_head = torch.randn(4, dtype=torch.float64, requires_grad=True)
    out, _ = hybrid_attention(*inputs[:5], window=4, log_gain=per_head)
    close(out, hybrid_attention(*inputs[:5], window=4, log_gain=per_head[None, :, None].expand(2, 4, 25))[0])
    close(out, definition.hybrid_attention(*inputs[:5], window=4, log_gain=per_head))
    zero = torch.zeros(4, dtype=torch.float64)
    assert torch.equal(
        hybrid_attention(*inputs[:5], window=4)[0], hybrid_attention(*inputs[:5], window=4, log_gain=zero)[0]
    )
    (grad,) = torch.autograd.grad(out.square().sum(), per_head)
    expected = definition.hybrid_attention(*inputs[:5], window=4, log_gain=per_head)
    close(grad, torch.autograd.grad(expected.square().sum(), per_head)[0])


@pytest.mark.parametrize("gain", [-300.0, 0.0, 300.0])
@pytest.mark.parametrize("logit", [1.0, 400.0])
def test_huge_gains_and_logits_do_not_overflow_in_float32(gain, logit):
    """exp(300) and exp(400) are beyond float32; the definition in float64 is the judge."""
    inputs = list(make(t=40))
    inputs[0] = inputs[0] * logit
    inputs[3], inputs[4] = inputs[3] * 1e-12, inputs[4] * 1e-12
    inputs[5] = torch.full_like(inputs[5], gain)
    single = tuple(x.float() for x in inputs)
    expected = slow(tuple(x.double() for x in single), window=6, sinks=2)
    torch.testing.assert_close(fast(single, window=6, sinks=2)[0].double(), expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_features_that_count_for_nothing_weigh_nothing_at_all(dtype):
    """A coefficient next to the smallest number would make every product with it slow."""
    lift = torch.tensor([-torch.inf, -1e4, -30.0, 0.0], dtype=dtype)
    unit, weight = blocks.combine(torch.zeros_like(lift), lift, torch.ones_like(lift))
    assert torch.equal(unit, torch.zeros_like(lift))
    assert weight[:2].tolist() == [0.0, 0.0]
    torch.testing.assert_close(weight[2:], lift[2:].exp())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 3e-2)])
def test_single_and_half_precision(dtype, tolerance):
    inputs = tuple(x.requires_grad_() for x in make(t=90, d=16, dtype=dtype))
    exact = tuple(x.detach().double().requires_grad_() for x in inputs)
    out, state = fast(inputs, window=16)
    expected = slow(exact, window=16)
    assert out.dtype == dtype
    assert state["S"].dtype == torch.float32
    assert (out.double() - expected).abs().max() < tolerance * expected.abs().max()
    grad = torch.randn_like(expected)
    ours, theirs = torch.autograd.grad(out, inputs, grad.to(dtype)), torch.autograd.grad(expected, exact, grad)
    for x, y in zip(ours, theirs, strict=True):
        assert x.dtype == dtype
        assert (x.double() - y).norm() < 2 * tolerance * y.norm()


def test_no_grad_and_autograd_give_identical_values():
    inputs = make(t=70, dtype=torch.float32)
    with torch.no_grad():
        quiet, _ = fast(inputs, window=16)
    loud, _ = fast([x.requires_grad_() for x in inputs], window=16)
    assert torch.equal(quiet, loud)


def test_uninitialized_memory_is_never_read(monkeypatch):
    """Every fresh buffer is filled with NaN; the result must not notice."""
    inputs = [x.requires_grad_() for x in make(t=50)]
    out, _ = fast(inputs, window=8, sinks=2, chunk=8)
    grads = torch.autograd.grad(out.sum(), inputs)
    empty = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **k: empty(*a, **k).fill_(torch.nan))
    poisoned, _ = fast(inputs, window=8, sinks=2, chunk=8)
    assert torch.equal(out, poisoned)
    for x, y in zip(grads, torch.autograd.grad(poisoned.sum(), inputs), strict=True):
        assert torch.equal(x, y)


def test_cutting_the_batch_to_fit_in_cache_changes_nothing(monkeypatch):
    inputs = [x.requires_grad_() for x in make(b=5, t=40)]
    out, _ = fast(inputs, window=8)
    grads = torch.autograd.grad(out.sum(), inputs)
    monkeypatch.setattr(blocks, "CACHE", 1)
    cut_out, _ = fast(inputs, window=8)
    close(cut_out, out)
    for x, y in zip(grads, torch.autograd.grad(cut_out.sum(), inputs), strict=True):
        close(x, y)


def test_window_only_is_softmax_over_sinks_and_window():
    q, k, v = make(t=50)[:3]
    out, state = window_attention(q, k, v, window=7, sinks=3)
    close(out, softmax_definition.softmax_attention(q, k, v, window=7, sinks=3))
    out, _ = window_attention(q[:, :, :1], k[:, :, :1], v[:, :, :1], window=7, sinks=3, state=state)
    assert out.shape == (2, 4, 1, 5)


def test_one_window_over_everything_is_softmax():
    inputs = make(t=33)
    out, _ = fast(inputs, window=33)
    expected = torch.nn.functional.scaled_dot_product_attention(*inputs[:3], is_causal=True, enable_gqa=True)
    close(out, expected)


@pytest.mark.parametrize("relative", [False, True])
def test_a_near_part_made_once_gives_the_same_values_and_feature_gradients(relative):
    inputs = make(t=50)
    near = near_attention(*inputs[:3], window=8, sinks=2)
    leaves = [x.requires_grad_() for x in inputs[3:]]
    options = {"window": 8, "sinks": 2, "relative": relative}
    whole, _ = fast(inputs, **options)
    reused, state = fast(inputs, near=near, **options)
    close(reused, whole)
    close(state["S"], fast(inputs, **options)[1]["S"])
    for x, y in zip(
        torch.autograd.grad(whole.square().sum(), leaves),
        torch.autograd.grad(reused.square().sum(), leaves),
        strict=True,
    ):
        close(x, y)


def test_strided_inputs_and_expanded_gradients():
    inputs = [x.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in make(t=30)]
    out, _ = fast(inputs, window=4)
    expected = slow(inputs, window=4)
    close(out, expected)
    for x, y in zip(torch.autograd.grad(out.sum(), inputs), torch.autograd.grad(expected.sum(), inputs), strict=True):
        close(x, y)


def test_time_is_linear_in_length():
    """Counted, not timed: the work of twice the blocks is twice the work."""
    from torch.utils.flop_counter import FlopCounterMode

    def flops(t):
        inputs = make(b=1, t=t, dtype=torch.float32)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            fast(inputs, window=16, chunk=64)  # in torch, whose work can be counted
        return counter.get_total_flops()

    assert flops(4096) / flops(2048) < 2.05


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"window": 0}, "window must be at least 1, got 0"),
        ({"sinks": -1}, "sinks must be at least 0, got -1"),
        ({"chunk": 0}, "chunk must be at least 1, got 0"),
        ({"log_gain": torch.zeros(3)}, r"log_gain must be \(4,\) or \(2, 4, 37\), got \(3\)"),
        ({"mask": torch.ones(2, 37)}, "mask must be bool or integer, True at real tokens, got float32"),
        ({"state": {}}, "state must hold k, v, fk, S, z, count, got nothing"),
    ],
)
def test_bad_options_are_refused_in_one_line(change, text):
    inputs = make()
    with pytest.raises(AttngapError, match=text):
        hybrid_attention(*inputs[:5], **({"window": 4} | change))


def test_bad_tensors_and_states_are_refused_in_one_line():
    q, k, v, fq, fk, _ = make()
    _, state = hybrid_attention(q, k, v, fq, fk, window=4)
    with pytest.raises(AttngapError, match=r"state\['k'\] must be \(2, 2, 9, 6\).*goes with the window and sinks"):
        hybrid_attention(q, k, v, fq, fk, window=5, state=state)
    with pytest.raises(AttngapError, match="fk has dtype float32 but q has float64"):
        hybrid_attention(q, k, v, fq, fk.float(), window=4)
    with pytest.raises(AttngapError, match="v holds NaN; every input must be finite"):
        hybrid_attention(q, k, v * torch.nan, fq, fk, window=4)
    with pytest.raises(AttngapError, match="q holds infinite values"):
        hybrid_attention(q * torch.inf, k, v, fq, fk, window=4)
    with pytest.raises(AttngapError, match=r"inplace=True would overwrite .* torch.no_grad"):
        hybrid_attention(q.clone().requires_grad_(), k, v, fq, fk, window=4, state=state, inplace=True)
    near = near_attention(q, k, v, window=4)
    with pytest.raises(AttngapError, match="near goes with a whole unpadded sequence"):
        hybrid_attention(q, k, v, fq, fk, window=4, state=state, near=near)
    with pytest.raises(AttngapError, match="near holds q, k and v fixed"):
        hybrid_attention(q.clone().requires_grad_(), k, v, fq, fk, window=4, near=near)


def test_memory_beyond_inputs_and_outputs_is_three_numbers_a_row():
    """What the backward keeps: inputs, outputs, and the statistics."""
    kept = {}

    def pack(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    inputs = [x.requires_grad_() for x in make(t=512, dtype=torch.float32)]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out, state = fast(inputs, window=16)
    for x in (*inputs, out):
        kept.pop(x.untyped_storage().data_ptr(), None)
    constant = sum(x.nbytes for x in state.values()) * 2
    assert sum(kept.values()) <= 3 * math.prod(inputs[0].shape[:3]) * 4 + constant
