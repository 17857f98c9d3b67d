"""The delta rule against its definition, against code we did not write, in any pieces, and under strong decays."""

import importlib.util
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from attngap.errors import AttngapError
from attngap.ops import groups, native
from attngap.ops.delta import definition, delta_attention

pytestmark = pytest.mark.usefixtures("both_ways")

DECAYS = ("none", "scalar", "vector")


def make(b=2, h=4, kv=2, t=37, r=5, dv=3, *, decay="scalar", gates="k", strength=1.0, dtype=torch.float64, seed=0):
    """q, k, v, beta, log_decay; keys of unit length, as in the papers."""
    generator = torch.Generator().manual_seed(seed)
    heads = kv if gates == "k" else h

    def draw(*size):
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    q, k, v = draw(b, h, t, r), F.normalize(draw(b, kv, t, r), dim=-1), draw(b, kv, t, dv)
    beta = draw(b, heads, t).sigmoid()
    g = {"none": None, "scalar": draw(b, heads, t), "vector": draw(b, heads, t, r)}[decay]
    g = None if g is None else -strength * g.abs()
    return [None if x is None else x.to(dtype) for x in (q, k, v, beta, g)]


def fast(inputs, **options):
    *rest, g = inputs
    return delta_attention(*rest, log_decay=g, **options)


def slow(inputs, **options):
    *rest, g = inputs
    return definition.delta_attention(*rest, log_decay=g, **options)


def leaves(inputs):
    return [x.requires_grad_() for x in inputs if x is not None]


def close(x, y, tolerance=1e-10):
    torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


def same_gradients(ours, theirs, tensors, tolerance=1e-9):
    above = [torch.randn_like(x) for x in ours]
    for x, y in zip(
        torch.autograd.grad(ours, tensors, above), torch.autograd.grad(theirs, tensors, above), strict=True
    ):
        close(x, y, tolerance)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize(("kv", "gates"), [(4, "k"), (2, "k"), (2, "q")])
@pytest.mark.parametrize(("t", "chunk"), [(1, None), (7, 3), (37, 8), (70, None)])
def test_values_state_and_gradients_equal_the_definition(t, chunk, kv, gates, decay):
    inputs = make(t=t, kv=kv, gates=gates, decay=decay)
    heads = kv if gates == "k" else 4
    S = torch.randn(2, heads, 5, 3, dtype=torch.float64, requires_grad=True)
    tensors = [*leaves(inputs), S]
    out, state = fast(inputs, chunk=chunk, state={"S": S})
    expected, last = slow(inputs, state={"S": S})
    last = last["S"][:, :: 4 // heads]
    close(out, expected)
    close(state["S"], last)
    same_gradients((out, state["S"]), (expected, last), tensors)


@pytest.mark.parametrize("decay", DECAYS)
def test_gradcheck(decay):
    inputs = make(b=1, h=2, kv=1, t=5, r=2, dv=2, decay=decay)
    tensors = leaves(inputs)

    def run(*found):
        out, state = fast([*found, None][:5], chunk=2)
        return out, state["S"]

    assert torch.autograd.gradcheck(run, tensors)


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_any_pieces_with_any_padding_give_the_whole(data):
    t, decay = data.draw(st.integers(1, 40), "t"), data.draw(st.sampled_from(DECAYS), "decay")
    inputs = make(t=t, decay=decay, gates=data.draw(st.sampled_from(("q", "k")), "gates"))
    tensors = leaves(inputs)
    mask = torch.rand(2, t) > 0.3 if data.draw(st.booleans(), "masked") else None
    expected, last = slow(inputs, mask=mask)
    state, outs, at = None, [], 0
    while at < t:
        stop = min(t, at + data.draw(st.sampled_from((1, 2, 7, 19)), "size"))
        piece = [None if x is None else x[:, :, at:stop] for x in inputs]
        chunk = data.draw(st.sampled_from((1, 3, 8, None)), "chunk")
        out, state = fast(piece, state=state, chunk=chunk, mask=None if mask is None else mask[:, at:stop])
        outs.append(out)
        at = stop
    heads = state["S"].shape[1]
    last = last["S"][:, :: 4 // heads]
    close(torch.cat(outs, 2), expected)
    close(state["S"], last)
    same_gradients((torch.cat(outs, 2), state["S"]), (expected, last), tensors)


@pytest.mark.parametrize("decay", DECAYS)
def test_padding_equals_the_unpadded_sequence_even_when_it_holds_nan(decay):
    inputs = make(b=1, t=20, decay=decay)
    padded = [None if x is None else torch.cat((x[:, :, :6] * 0 - torch.nan, x), 2) for x in inputs]
    if padded[4] is not None:
        padded[4] = padded[4].nan_to_num(-1.0)  # gates are refused before they are masked
    out, state = fast(padded, mask=(torch.arange(26) >= 6)[None], chunk=8)
    alone, last = fast(inputs, chunk=8)
    close(out[:, :, 6:], alone)
    assert not out[:, :, :6].any()
    close(state["S"], last["S"])


@pytest.mark.parametrize("decay", ["scalar", "vector"])
@pytest.mark.parametrize("strength", [1e-6, 50.0, 1000.0])
def test_strong_and_weak_decays_stay_exact_in_float32(decay, strength):
    exact = [x.float().double() for x in make(t=100, decay=decay, strength=strength)]
    single = [x.float() for x in exact]
    tensors, judges = leaves(single), leaves(exact)
    out, state = fast(single)
    expected, last = slow(exact)
    torch.testing.assert_close(out.double(), expected, rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(state["S"].double(), last["S"][:, ::2], rtol=2e-5, atol=2e-6)
    above = torch.randn_like(expected)
    ours, theirs = torch.autograd.grad(out, tensors, above.float()), torch.autograd.grad(expected, judges, above)
    for x, y in zip(ours, theirs, strict=True):
        assert (x.double() - y).abs().max() < 5e-5 * y.abs().max().clamp(min=1.0)


def test_bfloat16_within_its_bound():
    exact = [x.bfloat16().double() for x in make(t=150, r=16, dv=16)]
    half = [x.bfloat16() for x in exact]
    tensors, judges = leaves(half), leaves(exact)
    out, state = fast(half)
    expected, _ = slow(exact)
    assert (out.dtype, state["S"].dtype) == (torch.bfloat16, torch.float32)
    assert (out.double() - expected).norm() < 5e-3 * expected.norm()
    above = torch.randn_like(expected).bfloat16()
    ours, theirs = torch.autograd.grad(out, tensors, above), torch.autograd.grad(expected, judges, above.double())
    for x, y in zip(ours, theirs, strict=True):
        assert (x.double() - y).norm() < 1e-2 * y.norm()


def test_no_grad_and_autograd_give_identical_values():
    inputs = make(t=150, dtype=torch.float32)
    with torch.no_grad():
        quiet, _ = fast(inputs)
    leaves(inputs)
    assert torch.equal(quiet, fast(inputs)[0])


@pytest.mark.parametrize("decay", DECAYS)
def test_uninitialized_memory_is_never_read(decay, monkeypatch):
    monkeypatch.setattr(groups, "GROUP", 200)  # several groups, so that states wait in dv
    inputs = make(t=61, kv=4, decay=decay)
    tensors = leaves(inputs)
    out, _ = fast(inputs, chunk=8)
    grads = torch.autograd.grad(out.sum(), tensors)

    def poisoned(make_empty):
        return lambda *args, **options: make_empty(*args, **options).fill_(torch.nan)

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))
    again, _ = fast(inputs, chunk=8)
    assert torch.equal(out, again)
    for x, y in zip(grads, torch.autograd.grad(again.sum(), tensors), strict=True):
        assert torch.equal(x, y)


def test_the_size_of_a_group_changes_nothing(monkeypatch):
    inputs = make(t=100, kv=4)
    tensors = leaves(inputs)
    out, _ = fast(inputs, chunk=8)
    grads = torch.autograd.grad(out.sum(), tensors)
    monkeypatch.setattr(groups, "GROUP", 1)
    other, _ = fast(inputs, chunk=8)
    close(out, other)
    for x, y in zip(grads, torch.autograd.grad(other.sum(), tensors), strict=True):
        close(x, y)


@pytest.mark.parametrize("gates", ["k", "q"])
def test_the_backward_keeps_only_inputs(gates):
    inputs = make(t=300, kv=2, gates=gates, dtype=torch.float32)
    own = {x.untyped_storage().data_ptr() for x in leaves(inputs)}
    kept = {}

    def pack(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        _, state = fast(inputs)
    assert sum(size for place, size in kept.items() if place not in own) <= state["S"].nbytes


def test_time_is_linear_in_length():
    from torch.utils.flop_counter import FlopCounterMode

    def flops(t):
        inputs = make(b=1, t=t, dtype=torch.float32)
        with FlopCounterMode(display=False) as counter, torch.no_grad(), native.off():
            fast(inputs)
        return counter.get_total_flops()

    assert flops(4096) / flops(2048) == pytest.approx(2.0, rel=0.01)


def test_beta_of_one_overwrites_what_the_key_held():
    """With orthonormal keys written twice, the second value is read back exactly and nothing of the first remains."""
    k = torch.eye(4, dtype=torch.float64).repeat(2, 1)[None, None]
    v = torch.randn(1, 1, 8, 3, dtype=torch.float64)
    out, state = delta_attention(k, k, v, torch.ones(1, 1, 8, dtype=torch.float64))
    close(out, v)
    close(state["S"][0, 0], v[0, 0, 4:])


def theirs(x):
    """(b, h, t, ...) -> (b, t, h, ...), the layout of the peers."""
    return x.transpose(1, 2).contiguous()


@pytest.mark.parametrize("name", ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"])
def test_equals_the_gated_delta_rule_of_transformers(name):
    module = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    q, k, v, beta, g = make(t=150, kv=4, r=16, dv=16, dtype=torch.float32)
    start = torch.randn(2, 4, 16, 16)
    out, state = delta_attention(q * 16**-0.5, k, v, beta, log_decay=g, state={"S": start})
    peer = getattr(module, name)
    expected, last = peer(*map(theirs, (q, k, v, g, beta)), initial_state=start, output_final_state=True)
    torch.testing.assert_close(out, expected.transpose(1, 2), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state["S"], last, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"])
def test_equals_the_kimi_delta_attention_of_transformers(name):
    module = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    q, k, v, beta, g = make(t=100, kv=4, r=16, dv=16, decay="vector", dtype=torch.float32)
    out, state = delta_attention(q * 16**-0.5, k, v, beta, log_decay=g)
    peer = getattr(module, name)
    expected, last = peer(*map(theirs, (q, k, v, g, beta)), initial_state=None, output_final_state=True)
    torch.testing.assert_close(out, expected.transpose(1, 2), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state["S"], last, rtol=1e-4, atol=1e-5)


def fla_naive(rule):
    """fla/ops/<rule>/naive.py, loaded by path: the package itself needs Triton."""
    root = os.environ.get("ATTNGAP_FLA")
    if root is None:
        pytest.skip("set ATTNGAP_FLA to a checkout of flash-linear-attention")
    pytest.importorskip("einops", reason="flash-linear-attention's naive files need einops")
    path = Path(root) / "fla" / "ops" / rule / "naive.py"
    if not path.exists():
        pytest.skip(f"{path} does not exist: ATTNGAP_FLA should be a checkout of flash-linear-attention")
    spec = importlib.util.spec_from_file_location(f"fla_naive_{rule}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_equals_the_naive_delta_rule_of_fla():
    module = fla_naive("delta_rule")
    q, k, v, beta, _ = make(t=64, kv=4, r=16, dv=16, decay="none", dtype=torch.float32)
    out, state = delta_attention(q * 16**-0.5, k, v, beta)
    expected, last = module.delta_rule_recurrence(q, k, v, beta)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state["S"], last, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("rule", "name", "decay"),
    [
        ("gated_delta_rule", "naive_recurrent_gated_delta_rule", "scalar"),
        ("kda", "naive_recurrent_kda", "vector"),
    ],
)
def test_equals_the_naive_gated_rules_of_fla(rule, name, decay):
    peer = getattr(fla_naive(rule), name)
    q, k, v, beta, g = make(t=64, kv=4, r=16, dv=16, decay=decay, dtype=torch.float32)
    out, state = delta_attention(q * 16**-0.5, k, v, beta, log_decay=g)
    named = dict(zip(("q", "k", "v", "beta", "g"), map(theirs, (q, k, v, beta, g)), strict=True))
    expected, last = peer(**named, output_final_state=True)
    torch.testing.assert_close(out, expected.transpose(1, 2), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state["S"], last, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"chunk": 0}, "chunk must be at least 1, got 0"),
        ({"log_decay": torch.ones(2, 2, 37).double()}, r"log_decay must be finite and at most 0 .*\[1.0, 1.0\]"),
        ({"beta": torch.ones(2, 3, 37).double()}, r"beta must be \(2, 4, 37\) or \(2, 2, 37\), got \(2, 3, 37\)"),
        ({"state": {}}, "state must hold S, got nothing"),
        ({"state": {"S": torch.zeros(2, 2, 3, 5)}}, r"state\['S'\] must be \(2, 4, 5, 3\) or \(2, 2, 5, 3\)"),
        ({"v": torch.full((2, 2, 37, 3), torch.nan).double()}, "v holds NaN; every input must be finite"),
        ({"q": torch.zeros(2, 3, 37, 5).double()}, "heads of q must be a multiple of those of k and v, got 3 and 2"),
    ],
)
def test_bad_input_is_refused_in_one_line(change, text):
    q, k, v, beta, g = make()
    given = {"q": q, "k": k, "v": v, "beta": beta, "log_decay": g} | change
    with pytest.raises(AttngapError, match=text):
        delta_attention(**given)
