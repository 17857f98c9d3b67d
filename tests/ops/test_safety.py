"""What compiled kernels must never do to a process: every odd tensor works or is refused in one line."""

import signal
import subprocess
import sys
import threading

import pytest
import torch

from attngap import ops
from attngap.errors import AttngapError
from attngap.ops import native, pages
from attngap.ops.native import threads
from attngap.ops.native.scratch import lay_out
from attngap.ops.native.tensors import Rows

ATTENTIONS = ("linear", "delta", "hybrid", "softmax")


def call(name, q, k, v):
    if name == "linear":
        return ops.linear_attention(q, k, v)[0]
    if name == "delta":
        return ops.delta_attention(q, k, v, torch.ones(q.shape[:3]))[0]
    if name == "hybrid":
        return ops.hybrid_attention(q, k, v, q, k, window=4)[0]
    return ops.softmax_attention(q, k, v)


def draw(*shape):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0))


class Wrapped(torch.Tensor):
    """A tensor without memory of its own."""

    @staticmethod
    def __new__(cls, x):
        return torch.Tensor._make_wrapper_subclass(cls, x.shape, dtype=x.dtype)

    @classmethod
    def __torch_dispatch__(cls, f, types, args=(), kwargs=None):
        raise NotImplementedError


def fake(x):
    from torch._subclasses import FakeTensorMode

    return FakeTensorMode().from_tensor(x)


ODD = {
    "wrapper": (Wrapped, "q is a Wrapped: ops compute on plain tensors"),
    "fake": (fake, "q is a FakeTensor: ops compute on plain tensors"),
    "meta": (lambda x: x.to("meta"), "q is on the meta device"),
    "sparse": (lambda x: x.to_sparse(), "q is sparse_coo; ops compute on dense tensors"),
    "quantized": (lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), "q is quantized"),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("name", ATTENTIONS)
def test_tensors_that_are_not_their_own_memory_are_refused(name, kind):
    make, message = ODD[kind]
    x = draw(1, 2, 8, 16)
    with pytest.raises(AttngapError, match=message):
        call(name, make(x), x, x)


@pytest.mark.parametrize("name", ATTENTIONS)
def test_lazy_signs_and_zeros_without_memory_count(name):
    x = draw(1, 2, 8, 16)
    lazy = torch.complex(x, -x).conj().imag
    assert lazy.is_neg()
    torch.testing.assert_close(call(name, lazy, x, x), call(name, x.clone(), x, x))
    zeros = torch._efficientzerotensor(1, 2, 8, 16)
    torch.testing.assert_close(call(name, x, x, zeros), torch.zeros(1, 2, 8, 16))


@pytest.mark.parametrize("name", ["linear", "delta", "hybrid"])
def test_gradients_that_arrive_in_any_layout_count(name):
    x = draw(1, 2, 8, 16)
    expected = []
    for grad in (torch.ones(1, 2, 8, 16), torch.ones(()).expand(1, 2, 8, 16), torch.complex(x, -0 * x - 1).conj().imag):
        q = x.clone().requires_grad_()
        call(name, q, x, x).backward(grad)
        expected.append(q.grad)
    torch.testing.assert_close(expected[1], expected[0])
    torch.testing.assert_close(expected[2], expected[0])


@pytest.mark.parametrize("name", ATTENTIONS)
def test_expanded_flipped_and_transposed_inputs_are_what_they_say(name):
    x = draw(1, 2, 8, 16)
    for y in (x[:, :1].expand(1, 2, 8, 16), x.flip(2), x.transpose(1, 2).contiguous().transpose(1, 2), x[..., ::2]):
        torch.testing.assert_close(call(name, y, y, y), call(name, *[y.clone().contiguous()] * 3))


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("name", ATTENTIONS)
def test_transforms_and_traces_are_refused(name):
    x = draw(3, 1, 2, 8, 16)
    with pytest.raises(AttngapError, match="inside vmap or another transform"):
        torch.vmap(lambda q: call(name, q, q, q))(x)
    with pytest.raises(AttngapError, match=r"cannot be traced by torch\.jit"):
        torch.jit.trace(lambda q: call(name, q, q, q), (x[0],), check_trace=False)


def test_a_write_outside_of_scratch_memory_or_results_is_noticed(monkeypatch):
    import ctypes
    from typing import NamedTuple

    class Room(NamedTuple):
        field: int
        end: int
        guard: int

    monkeypatch.setenv("ATTNGAP_DEBUG_KERNELS", "1")
    scratch = lay_out(Room, {"field": 256})
    out = pages.empty((4, 4), torch.float32, torch.device("cpu"))

    def well(zero, address, first, last):
        ctypes.memset(address + scratch.room.field, 1, 256)
        ctypes.memset(out.data_ptr(), 1, out.nbytes)

    def beyond(zero, address, first, last):
        ctypes.memset(address + scratch.room.field, 1, 257)

    def beside(zero, address, first, last):
        ctypes.memset(out.data_ptr() - 1, 1, 1)

    native.run(well, (), torch.float32, 1, 1, scratch)
    with pytest.raises(AttngapError, match="wrote outside its scratch memory"):
        native.run(beyond, (), torch.float32, 1, 1, scratch)
    with pytest.raises(AttngapError, match="wrote outside a result of 64 bytes"):
        native.run(beside, (), torch.float32, 1, 1, scratch)
    ctypes.memset(out.data_ptr() - 1, pages.CANARY, 1)


@pytest.fixture(params=["torch's threads", "a pool"])
def several_threads(request, monkeypatch):
    """Three of either kind, whatever the work."""
    if request.param == "a pool":
        monkeypatch.setattr(threads, "team", lambda: None)
    elif threads.team() is None:
        pytest.skip("torch's threads are not GNU OpenMP's here")
    monkeypatch.setattr(native, "ALONE", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)


@pytest.mark.skipif(not native.available(), reason="numba is not installed")
def test_an_interrupt_waits_for_all_threads(several_threads):
    """A signal that raises while threads compute: none of them goes on after the call has ended."""
    started, release, after = threading.Event(), threading.Event(), []

    def kernel(zero, address, first, last):
        if first == last:
            return
        if threading.current_thread() is threading.main_thread():
            started.wait(10)
            threading.Timer(0.2, release.set).start()
            signal.raise_signal(signal.SIGINT)
        else:
            started.set()
            release.wait(10)
            after.append(first)

    from attngap.ops.native.scratch import Scratch

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # test runners may ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            native.run(kernel, (), torch.float32, 3, 1, Scratch(None, 0))
    finally:
        signal.signal(signal.SIGINT, before)
    found = len(after)
    assert found
    threading.Event().wait(0.3)
    assert len(after) == found


def test_an_error_of_one_thread_is_raised_after_all_are_done(several_threads):
    done = []

    def compute(address):
        done.append(address)
        if threading.current_thread() is not threading.main_thread():
            raise AttngapError(f"no share for {address}")
        threading.Event().wait(0.2)  # so that the others begin

    with pytest.raises(AttngapError, match="no share for"):
        threads.together(compute, [1, 2, 3])
    assert sorted(done) == [1, 2, 3]


def test_an_interrupt_before_this_thread_began_is_raised():
    """Python can only print what is raised between C and the first line of a callback."""

    def parallel(callback, data, count, flags):
        thread = threading.Thread(target=callback, args=(data,))
        thread.start()
        thread.join()

    done = []
    with pytest.raises(KeyboardInterrupt):
        threads._by_team(parallel, done.append, [1, 2])
    assert done == [1]


def test_many_python_threads_at_once():
    x = draw(1, 2, 40, 16)
    expected, results = call("hybrid", x, x, x), []
    several = [threading.Thread(target=lambda: results.append(call("hybrid", x, x, x))) for _ in range(8)]
    for thread in several:
        thread.start()
    for thread in several:
        thread.join()
    assert len(results) == 8
    assert all(torch.equal(x, expected) for x in results)


NO_PLACE = """
import numba.core.caching as caching
caching.CacheImpl._locator_classes = []
from attngap.ops.native.vectors import kernel
print(kernel(lambda x: x + 1)(1), kernel(lambda x: x + 2)(1))
"""


@pytest.mark.skipif(not native.available(), reason="numba is not installed")
def test_without_a_place_to_keep_them_kernels_are_compiled_in_memory():
    done = subprocess.run([sys.executable, "-c", NO_PLACE], capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["2", "3"], done.stderr
    assert done.stderr.count("cannot be kept") == 1


def test_rows_are_checked_before_their_address_is_used():
    from attngap.ops.native.tensors import as_rows

    assert isinstance(as_rows(torch.zeros(1, 1, 1, 1))[0], Rows)
    with pytest.raises(AttngapError, match="four axes on the CPU"):
        as_rows(torch.zeros(2, 2))
