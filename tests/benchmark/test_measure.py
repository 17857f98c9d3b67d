"""The measures themselves: known allocations, known operations, and what must not grow with the sequence."""

import pytest
import torch

from attngap import ops
from attngap.benchmark import measure
from attngap.benchmark.measure import best_milliseconds, extra_mb, matmul_rate, operations


def test_extra_memory_counts_the_peak_beyond_the_result():
    def call():
        scratch = torch.empty(3 * 2**18)  # 3 MB
        result = torch.empty(2**18)  # 1 MB
        del scratch
        return result

    assert extra_mb(call, kept=2**20) == pytest.approx(3, abs=0.01)


def test_the_profiler_keeps_quiet(capfd):
    extra_mb(lambda: torch.empty(10), kept=0)
    assert capfd.readouterr().err == ""


def test_operations_are_those_of_the_products():
    a, b = torch.rand(3, 4), torch.rand(4, 5)
    assert operations(lambda: a @ b) == 2 * 3 * 4 * 5


def test_times_are_of_each_call():
    times = best_milliseconds(
        {"short": lambda: torch.zeros(1), "long": lambda: torch.rand(400, 400) @ torch.rand(400, 400)}
    )
    assert 0 < times["short"] < times["long"]
    assert matmul_rate(64) > 0


@pytest.mark.parametrize(("ages", "calls"), [(0.0, 1), (9.0, 2)], ids=["ages", "slow"])
def test_slow_calls_are_few(ages, calls, monkeypatch):
    monkeypatch.setattr(measure, "PATIENCE", 0.0)
    monkeypatch.setattr(measure, "AGES", ages)
    called = []
    best_milliseconds({"slow": lambda: called.append(1) or torch.zeros(1)})
    assert len(called) == calls


@pytest.mark.parametrize("direction", ["forward", "forward+backward"])
@pytest.mark.parametrize("log_decay", [False, True], ids=["plain", "decayed"])
def test_extra_memory_of_linear_attention_does_not_grow(direction, log_decay):
    def extra(t):
        q, k, v = (torch.rand(1, 4, t, 16).requires_grad_(direction != "forward") for _ in range(3))
        decay = -torch.rand(1, 4, t) if log_decay else None
        kept = v.nbytes if direction == "forward" else 4 * v.nbytes

        def call():
            out, _ = ops.linear_attention(q, k, v, log_decay=decay)
            if direction != "forward":
                for x in (q, k, v):
                    x.grad = None
                out.backward(torch.ones(()).expand(out.shape))
            return out.detach()

        return extra_mb(call, kept)

    short, long = extra(4096), extra(16384)
    assert short > 0
    assert long <= 1.1 * short


def test_grouped_heads_do_not_copy_keys():
    """With one key head for eight query heads, extra memory stays far below k and v repeated for every query head."""
    q, k, v = torch.rand(1, 8, 32768, 16), torch.rand(1, 1, 32768, 16), torch.rand(1, 1, 32768, 16)
    repeated = 8 * (k.nbytes + v.nbytes) / 2**20
    assert extra_mb(lambda: ops.linear_attention(q, k, v)[0], kept=q.nbytes) < repeated / 4
