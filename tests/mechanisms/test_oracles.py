"""Against code and formulas we did not write: transformers, flash-linear-attention's naive files, the papers' rows."""

import importlib.util
import os
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.mamba2 import modeling_mamba2 as mamba2
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from attngap import mechanism
from attngap.mechanisms.contracts import make_case
from attngap.ops import hybrid_attention

SINGLE = {"rtol": 2e-5, "atol": 2e-5}  # the oracles below compute in float32
HEADS, DIM, VALUE_DIM, LENGTH = 4, 8, 6, 64


def sample(name, **options):
    """(mechanism, streams, output of the fast form, raw q, k, v), in float32."""
    case = make_case(mechanism(name, HEADS, DIM, VALUE_DIM, **options), length=LENGTH)
    m = case.mechanism.float()
    x = None if case.x is None else case.x.float()
    q, k, v = case.q.float(), case.k.float(), case.v.float()
    streams = m.read(x, q, k, v)
    return m, streams, m.chunked(streams)[0], (q, k, v)


def swap(*tensors):
    """(b, h, t, ...) <-> (b, t, h, ...)."""
    return [x.transpose(1, 2) for x in tensors]


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("causal", [True, False])
def test_softmax_is_torch_sdpa(causal, kv_heads):
    _, _, out, (q, k, v) = sample("softmax", causal=causal, kv_heads=kv_heads)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    torch.testing.assert_close(out, expected, **SINGLE)


@pytest.mark.parametrize("rule", [qwen.torch_recurrent_gated_delta_rule, qwen.torch_chunk_gated_delta_rule])
def test_gated_delta_is_transformers(rule):
    _, streams, out, (q, k, v) = sample("gated-delta")
    g, beta = streams.log_decay, streams.beta
    expected, _ = rule(
        *swap(q, k, v), g=swap(g)[0], beta=swap(beta)[0], initial_state=None, use_qk_l2norm_in_kernel=True
    )
    torch.testing.assert_close(out, swap(expected)[0], **SINGLE)


@pytest.mark.parametrize("rule", [kimi.recurrent_kimi_delta_attention, kimi.chunk_kimi_delta_attention])
def test_kda_is_transformers(rule):
    _, streams, out, (q, k, v) = sample("kda")
    g, beta = swap(streams.log_decay, streams.beta)
    options = {"initial_state": None, "output_final_state": False, "use_qk_l2norm_in_kernel": True, "chunk_size": 16}
    expected, _ = rule(*swap(q, k, v), g, beta, **options)
    torch.testing.assert_close(out, swap(expected)[0], **SINGLE)


def test_ssd_is_transformers_mamba2():
    m, _, out, (q, k, v) = sample("ssd")
    x = make_case(mechanism("ssd", HEADS, DIM, VALUE_DIM), length=LENGTH).x.float()
    dt = F.linear(x, m.decay.project.weight)
    C, B, X = swap(q, k, v)
    rate = -m.decay.log_rate.exp()
    expected = mamba2.mamba2_chunk_scan(X, dt, rate, B, C, 16, dt_bias=m.decay.bias, dt_softplus=True)
    expected = expected[0] if isinstance(expected, tuple) else expected
    torch.testing.assert_close(out, swap(expected)[0], **SINGLE)


def naive(operator):
    """A naive file of flash-linear-attention, loaded by path: no package, no Triton."""
    root = os.environ.get("ATTNGAP_FLA")
    if not root:
        pytest.skip("ATTNGAP_FLA is not set: point it at a checkout of flash-linear-attention")
    pytest.importorskip("einops", reason="flash-linear-attention's naive files use einops")
    path = Path(root) / "fla" / "ops" / operator / "naive.py"
    spec = importlib.util.spec_from_file_location(f"fla_naive_{operator}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_linear_is_fla():
    _, streams, out, _ = sample("elu")
    expected, _ = naive("linear_attn").naive_recurrent_linear_attn(
        *swap(streams.q, streams.k, streams.v), normalize=True
    )
    torch.testing.assert_close(out, swap(expected)[0], **SINGLE)


@pytest.mark.parametrize("cut", [0, 23])
def test_far_part_of_a_hybrid_is_fla_linear_attention_of_late_keys(cut):
    """Keys enter when they leave the window, sinks never, and a column of ones beside the values sums the far mass."""
    window, sinks, heads, length, width = 5, 2, 4, 48, 6
    q, k, v = (torch.randn(2, heads, length, 8) for _ in range(3))
    fq, fk = (torch.rand(2, heads, length, width) for _ in range(2))
    whole, _ = hybrid_attention(q, k, v, fq, fk, window=window, sinks=sinks)

    place = torch.arange(length)
    near = (place[:, None] >= place) & ((place[:, None] - place < window) | (place < sinks))
    weights = (q @ k.mT * 8**-0.5).exp() * near
    ones = torch.cat((v, torch.ones_like(v[..., :1])), -1)
    late = F.pad(fk * (place >= sinks)[:, None], (0, 0, window, 0))[:, :, :length]
    values = F.pad(ones, (0, 0, window, 0))[:, :, :length]
    far, state = [], None
    for part in (slice(0, cut), slice(cut, length)):  # a state of theirs goes on where ours would
        found, state = naive("linear_attn").naive_recurrent_linear_attn(
            *swap(fq[:, :, part], late[:, :, part], values[:, :, part]),
            scale=1.0,
            initial_state=state,
            output_final_state=True,
        )
        far.append(swap(found)[0])
    total = weights @ ones + torch.cat(far, 2)
    torch.testing.assert_close(whole, total[..., :-1] / total[..., -1:], **SINGLE)


def test_retention_is_fla():
    _, _, out, (q, k, v) = sample("retention")
    torch.testing.assert_close(out, naive("retention").naive_retention(q, k, v), **SINGLE)


def test_scalar_gate_is_fla_simple_gla():
    _, streams, out, _ = sample("ssd")
    args = swap(streams.q, streams.k, streams.v, streams.log_decay)
    expected, _ = naive("simple_gla").naive_recurrent_simple_gla(*args, scale=1.0)
    torch.testing.assert_close(out, swap(expected)[0], **SINGLE)


def test_gla_is_fla():
    _, streams, out, (q, k, v) = sample("gla")
    expected, _ = naive("gla").naive_recurrent_gla(*swap(q, k, v, streams.log_decay))
    torch.testing.assert_close(out, swap(expected)[0], **SINGLE)


def test_delta_is_fla():
    _, streams, out, (q, k, v) = sample("delta")
    unit = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    expected, _ = naive("delta_rule").delta_rule_recurrence(*unit, v, streams.beta)
    torch.testing.assert_close(out, expected, **SINGLE)


def test_gated_delta_is_fla():
    _, streams, out, (q, k, v) = sample("gated-delta")
    q, k, v, beta, g = swap(F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, streams.beta, streams.log_decay)
    expected, _ = naive("gated_delta_rule").naive_recurrent_gated_delta_rule(q, k, v, beta, g)
    torch.testing.assert_close(out, swap(expected)[0], **SINGLE)


def test_kda_is_fla():
    _, streams, out, (q, k, v) = sample("kda")
    q, k, v, g, beta = swap(F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, streams.log_decay, streams.beta)
    expected, _ = naive("kda").naive_recurrent_kda(q, k, v, g, beta)
    torch.testing.assert_close(out, swap(expected)[0], **SINGLE)


def test_taylor_is_fla_based():
    _, _, out, (q, k, v) = sample("taylor")
    torch.testing.assert_close(out, naive("based").naive_parallel_based(q, k, v), **SINGLE)


def test_cosformer_is_the_papers_row():
    m, streams, _, (q, k, _) = sample("cosformer", length=80)
    place = torch.arange(LENGTH)
    distance = torch.cos(torch.pi / 2 * (place[:, None] - place) / 80)
    raw = (F.relu(q) @ F.relu(k).mT * distance).tril()
    expected = (raw / raw.sum(-1, keepdim=True)).nan_to_num(0.0)  # a row without positive scores reads nothing
    torch.testing.assert_close(m.weights(streams), expected, **SINGLE)


@pytest.mark.parametrize("causal", [True, False])
def test_inline_is_the_papers_row(causal):
    """Row i over its keys: a - mean(a) + 1/n, with the scale of the released code."""
    m, streams, _, (q, k, _) = sample("inline", causal=causal)
    weights = m.weights(streams)
    for i in (0, 5, LENGTH - 1):
        n = i + 1 if causal else LENGTH
        scores = (q[:, :, i, None] @ k[:, :, :n].mT)[:, :, 0] * DIM**-0.5 / n
        torch.testing.assert_close(weights[:, :, i, :n], scores - scores.mean(-1, keepdim=True) + 1 / n, **SINGLE)


@pytest.mark.parametrize("causal", [True, False])
def test_mala_is_the_papers_row(causal):
    """Row i over its keys: beta a - gamma, beta = 1 + 1 / sum(a), gamma = sum(a) / n."""
    m, streams, _, (q, k, _) = sample("mala", causal=causal)
    weights = m.weights(streams)
    q, k = F.elu(q) + 1, F.elu(k) + 1
    for i in (0, 5, LENGTH - 1):
        n = i + 1 if causal else LENGTH
        scores = (q[:, :, i, None] @ k[:, :, :n].mT)[:, :, 0] * DIM**-0.5 / n
        total = scores.sum(-1, keepdim=True)
        torch.testing.assert_close(weights[:, :, i, :n], (1 + 1 / total) * scores - total / n, **SINGLE)


def test_mala_sharpens_with_the_length_of_q_where_division_cannot():
    """Doubling phi(q) leaves normalized linear attention as it is and makes MALA's rows more uneven (2507.00698)."""
    q, k = torch.full((1, 1, 8, 4), 2.0), torch.rand(1, 1, 8, 4, generator=torch.Generator().manual_seed(3))
    for name, sharper in (("elu", False), ("mala", True)):
        m = mechanism(name, 1, 4)
        short, long = (m.weights(m.read(None, scale * (q + 1) - 1, k, k))[0, 0, -1] for scale in (1, 8))
        assert bool(long.std() > 2 * short.std()) is sharper


def test_hybrid_with_a_window_over_everything_is_softmax():
    m, _, out, (q, k, v) = sample("hybrid", window=LENGTH, sinks=0)
    assert m.normalized
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, is_causal=True), **SINGLE)


def test_hybrid_without_features_reads_sinks_and_window_only():
    m, streams, _, _ = sample("hybrid", window=5, sinks=2, feature_map="none")
    weights = m.weights(streams)
    place = torch.arange(LENGTH)
    near = (place[:, None] - place < 5) | (place < 2)
    assert (weights[..., ~near] == 0).all()
    assert (weights[..., near.tril()] > 0).all()
