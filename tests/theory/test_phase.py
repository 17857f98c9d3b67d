import pytest

from attngap.errors import AttngapError
from attngap.theory.phase import phase


def test_phase_rows_cover_both_diagrams():
    done = []
    found = phase(
        n=1024, d=130, m=20, b=0.5, kernels=("softmax", "linear"), cells=6, advance=lambda **_: done.append(1)
    )
    assert len(done) == 4
    assert len(found["scale"]["cells"]) == 2 * 6 * 6
    softmax = {
        (row["scale"], row["needle"]): row["success"] for row in found["scale"]["cells"] if row["kernel"] == "softmax"
    }
    assert max(softmax.values()) > 0.5
    assert softmax[min(softmax)] < 0.01
    assert all(row["success"] < 0.01 for row in found["scale"]["cells"] if row["kernel"] == "linear")
    assert {row["curve"] for row in found["length"]["curves"]} == {"critical, exact for large d", "weight tends to 1"}
    assert all(row["n"] % 128 == 0 for row in found["length"]["cells"])


def test_phase_refuses_nonsense():
    with pytest.raises(AttngapError, match="cells must be at least 2, got 1"):
        phase(n=1024, d=130, m=20, b=0.5, cells=1)
    with pytest.raises(AttngapError, match="the largest n must be at least"):
        phase(n=1024, d=130, m=20, b=0.5, largest=100)
