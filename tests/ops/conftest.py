import contextlib
import os

import pytest

from attngap.ops import native

os.environ.setdefault("ATTNGAP_DEBUG_KERNELS", "1")  # canaries around results and scratch memory


@pytest.fixture(params=["native", "torch"], scope="module")
def both_ways(request):
    """Every test of a module that uses it runs with the compiled kernels and without."""
    if request.param == "native" and not native.available():
        pytest.skip("numba is not installed")
    with contextlib.nullcontext() if request.param == "native" else native.off():
        yield
