"""The compiled kernels: when they are used, in threads, after a fork."""

import multiprocessing
import os

import pytest
import torch

from attngap.ops import delta_attention, linear_attention, native

pytestmark = pytest.mark.skipif(not native.available(), reason="numba is not installed")


def made(dtype=torch.float32, t=96, r=32):
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.rand(2, 3, t, r, generator=generator, dtype=dtype) / r for _ in range(2))
    return q, k, torch.randn(2, 3, t, 32, generator=generator, dtype=dtype), torch.rand(2, 3, t, generator=generator)


def outcome():
    q, k, v, beta = (x.requires_grad_() for x in made())
    rows = linear_attention(q, k, v)[0] + delta_attention(q, k, v, beta, log_decay=-beta)[0]
    return [rows.detach(), *torch.autograd.grad(rows.square().sum(), (q, k, v, beta))]


def test_used_where_they_can_be():
    q, k, v, _ = made()
    state = torch.zeros(2, 3, 32, 32)
    assert native.usable(q, k, v, None, state=state)
    assert not native.usable(q.bfloat16(), k, v, state=state)
    assert not native.usable(q, k, v, state=torch.zeros(1, 1, 1, 1).expand(2, 3, 1024, 1024))
    with native.off():
        assert not native.usable(q, k, v, state=state)
    assert native.usable(q, k, v, state=state)


def test_turned_off_by_the_environment(monkeypatch):
    monkeypatch.setenv("ATTNGAP_NATIVE", "0")
    native.available.cache_clear()
    try:
        assert not native.available()
    finally:
        native.available.cache_clear()


def test_the_number_of_threads_changes_nothing(monkeypatch):
    monkeypatch.setattr(native, "ALONE", 0)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = outcome()
        torch.set_num_threads(2)
        for one, two in zip(alone, outcome(), strict=True):
            assert torch.equal(one, two)
    finally:
        torch.set_num_threads(before)


def _in_child(queue):
    queue.put([x.tolist() for x in outcome()])


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_threads_are_made_anew_after_a_fork(monkeypatch):
    monkeypatch.setattr(native, "ALONE", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    expected = outcome()  # starts the threads of this process
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_in_child, args=(queue,))
    child.start()
    try:
        found = queue.get(timeout=60)
    finally:
        child.kill()
    assert found == [x.tolist() for x in expected]


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_gate_beyond_all_numbers_forgets_everything(channels, dtype):
    """exp of it is 0, not the smallest number: products with that would be slow."""
    q, k, v = (torch.rand(1, 2, 2, 16, dtype=dtype) for _ in range(3))
    k[:, :, 1] = 0  # writes nothing
    gate = torch.tensor([0.0, -1e4], dtype=dtype).expand(1, 2, 2)
    gate = gate[..., None].repeat(1, 1, 1, 16) if channels else gate
    _, linear = linear_attention(q, k, v, log_decay=gate, normalize=False)
    _, delta = delta_attention(q, k, v, torch.ones(1, 2, 2, dtype=dtype), log_decay=gate)
    assert not linear["S"].any()
    assert not delta["S"].any()


def test_what_was_compiled_before_a_file_changed_is_forgotten(tmp_path):
    """Kernels are compiled into others from other files."""
    from attngap.ops.native.vectors import forget_older

    held = tmp_path / "op" / "__pycache__"
    held.mkdir(parents=True)
    (tmp_path / "native").mkdir()
    files = {tmp_path / "native" / "called.py": 200, tmp_path / "op" / "kernels.py": 100, tmp_path / "normalizer.py": 1}
    files |= {
        held / "kernels.old.nbi": 150,
        held / "kernels.old.1.nbc": 150,
        held / "kernels.new.nbi": 250,
        held / "x.pyc": 1,
    }
    for path, time in files.items():
        path.write_bytes(b"")
        os.utime(path, (time, time))
    forget_older(tmp_path)
    assert sorted(path.name for path in held.iterdir()) == ["kernels.new.nbi", "x.pyc"]
