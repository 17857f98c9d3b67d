"""Softmax attention: equal to its definition and to torch's own, in windows, groups, blocks and padding."""

import inspect

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from attngap.errors import AttngapError
from attngap.ops.softmax import blocks, definition, softmax_attention


def make(b=2, kv_heads=2, group=1, t=33, d=4, dv=4, dtype=torch.float64):
    return [
        torch.randn(b, kv_heads * group, t, d, dtype=dtype),
        torch.randn(b, kv_heads, t, d, dtype=dtype),
        torch.randn(b, kv_heads, t, dv, dtype=dtype),
    ]


def with_grads(op, inputs, **options):
    inputs = [x.clone().requires_grad_() for x in inputs]
    out = op(*inputs, **options)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(out.dtype)
    return out, torch.autograd.grad((out * weight).sum(), inputs)


def agree(inputs, **options):
    expected, expected_grads = with_grads(definition.softmax_attention, inputs, **options)
    got, got_grads = with_grads(softmax_attention, inputs, **options)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
    for name, x, y in zip("qkv", got_grads, expected_grads, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"d{n}: {m}")


@pytest.fixture
def small_blocks(monkeypatch):
    """Many blocks of rows and tiles of keys even in a short sequence."""
    monkeypatch.setattr(blocks, "ROWS", 4)
    monkeypatch.setattr(blocks, "TILE", 8)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("padding", ["none", "ends", "anywhere"])
@pytest.mark.parametrize(("window", "sinks"), [(None, 0), (1, 0), (3, 2), (3, 9), (20, 2), (50, 1)])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
@pytest.mark.parametrize(("group", "dv"), [(1, 4), (2, 3)])
def test_equals_its_definition(group, dv, causal, window, sinks, padding):
    mask = None
    if padding == "ends":
        mask = (torch.arange(33) >= torch.tensor([[0], [5]])) & (torch.arange(33) < torch.tensor([[30], [33]]))
    elif padding == "anywhere":
        mask = torch.rand(2, 33) > 0.3
    agree(make(group=group, dv=dv), causal=causal, window=window, sinks=sinks, mask=mask, scale=1.3)


@settings(max_examples=30, deadline=None)
@given(
    shape=st.fixed_dictionaries(
        {name: st.integers(1, most) for name, most in (("kv_heads", 2), ("group", 3), ("t", 20), ("d", 4), ("dv", 4))}
    ),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 25),
    sinks=st.integers(0, 5),
)
def test_any_shape(shape, causal, window, sinks):
    agree(make(**shape), causal=causal, window=window, sinks=sinks)


@pytest.mark.parametrize("causal", [True, False])
def test_blocks_equal_torch_on_long_sequences(causal):
    """Widths that differ go through blocks; padded with zeros to one width, torch takes them too."""
    q, k, v = make(b=1, group=2, t=1500, d=8, dv=5, dtype=torch.float32)
    expected = F.scaled_dot_product_attention(q, k, F.pad(v, (0, 3)), is_causal=causal, enable_gqa=True)[..., :5]
    torch.testing.assert_close(softmax_attention(q, k, v, causal=causal), expected, rtol=1e-4, atol=1e-5)


def test_padding_rows_are_zero_and_a_sequence_of_padding_only_is_too():
    mask = torch.tensor([[True] * 10 + [False] * 23, [False] * 33])
    out = softmax_attention(*make(), mask=mask)
    assert (out[0, :, 10:] == 0).all()
    assert (out[1] == 0).all()
    assert (out[0, :, :10] != 0).any()


@pytest.mark.parametrize("window", [None, 40])
def test_bfloat16_accumulates_in_float32(window):
    """Against float32 on the same rounded inputs: within one ulp of bfloat16, 2^-8 of the largest entry."""
    short = make(t=300, d=16, dv=16, dtype=torch.bfloat16)
    expected, expected_grads = with_grads(softmax_attention, [x.float() for x in short], window=window)
    got, got_grads = with_grads(softmax_attention, short, window=window)
    assert got.dtype == torch.bfloat16
    assert (got.float() - expected).abs().max() <= 2**-8 * expected.abs().max()
    for x, y in zip(got_grads, expected_grads, strict=True):
        assert (x.float() - y).abs().max() <= 2**-6 * y.abs().max()


@pytest.mark.usefixtures("small_blocks")
def test_gradcheck():
    inputs = [x.requires_grad_() for x in make(b=1, kv_heads=1, group=2, t=9, d=2, dv=3)]
    assert torch.autograd.gradcheck(lambda q, k, v: softmax_attention(q, k, v, window=3, sinks=1), inputs)


@pytest.mark.usefixtures("small_blocks")
def test_buffers_are_written_before_they_are_read():
    """Deterministic mode fills every fresh buffer with NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        out, found = with_grads(softmax_attention, make(dv=3), window=5, sinks=2)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(x.isfinite().all() for x in (out, *found))


def test_values_do_not_depend_on_autograd():
    for inputs in (make(), make(dv=3)):
        with torch.no_grad():
            plain = softmax_attention(*inputs)
        assert torch.equal(plain, softmax_attention(*(x.requires_grad_() for x in inputs)))


def test_extreme_logits_are_exact():
    """One key a row takes all: no overflow where exp of the logit would be infinite."""
    q, k, v = make(dv=3)
    out = softmax_attention(q * 1e4, k, v)
    torch.testing.assert_close(out, definition.softmax_attention(q * 1e4, k, v), rtol=1e-10, atol=1e-10)


def test_a_second_derivative_is_refused():
    q, k, v = (x.requires_grad_() for x in make(dv=3))
    (first,) = torch.autograd.grad((softmax_attention(q, k, v) ** 2).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"window": 0}, "window must be at least 1, got 0"),
        ({"sinks": -1}, "sinks must be at least 0, got -1"),
        ({"scale": torch.nan}, "scale must be a finite number, got nan"),
        ({"q": torch.full((2, 2, 33, 4), torch.nan).double()}, "q holds NaN; every input must be finite"),
        ({"k": torch.full((2, 2, 33, 4), torch.inf).double()}, "k holds infinite values; every input must be finite"),
        ({"scale": 1e308}, "overflowed although the inputs are finite"),
        ({"v": torch.zeros(2, 2, 33).double()}, "v must have four axes"),
    ],
)
def test_bad_input_is_named(change, text):
    op = inspect.unwrap(softmax_attention)  # past the shape checks that only pytest runs
    q, k, v = make()
    with pytest.raises(AttngapError, match=text):
        op(**{"q": q * 100, "k": k * 100, "v": v, **change})
