import contextlib

import pytest

from attngap.ops import native


@pytest.fixture(autouse=True, scope="module")
def canaries():
    """Around results and scratch memory of compiled kernels, looked at after every call."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATTNGAP_DEBUG_KERNELS", "1")
        yield


@pytest.fixture(params=["native", "torch"], scope="module")
def both_ways(request):
    """Every test of a module that uses it runs with the compiled kernels and without."""
    if request.param == "native" and not native.available():
        pytest.skip("numba is not installed")
    with contextlib.nullcontext() if request.param == "native" else native.off():
        yield
