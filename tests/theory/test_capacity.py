import pytest

from attngap.errors import AttngapError
from attngap.theory.capacity import capacity, curve, recall


@pytest.mark.parametrize("size", [(64, 64, 1000), (128, 64, 500)])
def test_law_holds_for_gaussian_keys(size):
    law = capacity(*size)
    assert recall(law, round(law.reliable)).low > 0.95
    assert 0.45 < recall(law, round(law.half)).value < 0.65


def test_law_fails_where_it_should():
    law = capacity(64, 64, 1000)
    assert recall(law, round(law.reliable), keys="positive").value < 0.1  # overlapping keys
    assert recall(law, 64, keys="orthogonal").value == 1.0
    two = capacity(64, 64, 2)
    assert recall(two, round(two.reliable)).value < 0.75  # two codes: half is chance


def test_curve_falls_with_the_load():
    found = [row["recall"] for row in curve(capacity(32, 32, 200), trials=4)]
    assert found == sorted(found, reverse=True)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: capacity(0, 8, 8), "capacity: rank must be at least 1, got 0"),
        (lambda: capacity(8, 8, 1), "capacity: vocabulary must be at least 2, got 1"),
        (lambda: recall(capacity(8, 8, 8), 0), "recall: count must be at least 1, got 0"),
        (lambda: recall(capacity(8, 8, 8), 4, keys="gausian"), "Did you mean 'gaussian'"),
    ],
)
def test_bad_sizes(call, message):
    with pytest.raises(AttngapError, match=message):
        call()
