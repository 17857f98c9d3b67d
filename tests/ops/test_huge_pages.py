"""Large results in large pages: the same tensors, whatever the kernel makes of the advice."""

import ctypes
import subprocess
import sys

import pytest
import torch

from attngap.ops import pages


def test_fresh_tensors_are_ordinary_ones():
    for shape in ((3, 5), (1024, 1025)):
        x = pages.empty(shape, torch.float64, torch.device("cpu"))
        assert x.shape == shape
        assert x.dtype == torch.float64
        assert x.is_contiguous()
        x.fill_(2.0)
        assert x.sum() == 2.0 * x.numel()


@pytest.fixture(autouse=True, scope="module")
def canaries():
    """None: memory with guards around it is not what is tested here."""


def test_like_is_contiguous_whatever_the_layout():
    x = torch.rand(4, 6, 5).transpose(0, 2)
    assert pages.empty_like(x).shape == x.shape
    assert pages.empty_like(x).is_contiguous()


def test_only_large_tensors_are_advised_on(monkeypatch):
    asked = []
    monkeypatch.setattr(pages, "_madvise", lambda: lambda start, length, advice: asked.append((start, length)) or 0)
    pages.empty((pages.LARGE // 8,), torch.float32, torch.device("cpu"))
    assert asked == []
    x = pages.empty((pages.LARGE,), torch.float32, torch.device("cpu"))
    ((start, length),) = asked
    assert x.data_ptr() <= start
    assert start + length <= x.data_ptr() + x.nbytes
    assert length > x.nbytes - 2 * 4096


def test_without_huge_pages_there_is_no_advice(monkeypatch):
    monkeypatch.setattr(pages, "_madvise", lambda: None)
    assert pages.empty((pages.LARGE,), torch.float32, torch.device("cpu")).numel() == pages.LARGE


FAULTS = """
import resource, sys
import torch
from attngap.ops.pages import keep_freed
if sys.argv[1] == "keep":
    keep_freed()
faults = []
for _ in range(8):  # at first to get the memory; a small object at its start may make it move once more
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(2**24)
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(min(faults))
"""


@pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library has no mallopt"
)
def test_freed_memory_is_kept_where_asked():
    """In processes of their own: it cannot be undone."""
    faults = {
        how: int(subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=True).stdout)
        for how in ("keep", "give back")
    }
    assert faults["keep"] < faults["give back"] / 10


LEFT = """
import sys
from pathlib import Path
import torch
from attngap.ops.pages import give_back

def held():
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("RssAnon"))
    return 1024 * int(line.split()[1])

torch.ones(2**22).sum()  # 16 MB, freed: smaller pieces come from the heap from now on
before, large, small = held(), [], []
for _ in range(40):
    large.append(torch.ones(2**20))
    small.append(torch.ones(2**14))  # these stay
del large
if sys.argv[1] == "give back":
    give_back()
print(held() - before)
"""


@pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library has no malloc_trim"
)
def test_freed_memory_is_given_back_where_asked():
    left = {
        how: int(subprocess.run([sys.executable, "-c", LEFT, how], capture_output=True, text=True, check=True).stdout)
        for how in ("keep", "give back")
    }
    assert left["keep"] > 100e6
    assert left["give back"] < 20e6
