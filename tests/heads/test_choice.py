import pytest

from attngap.heads.choice import best_heads, ranked_units

SCORES = {(0, 0): 0.1, (0, 1): 0.5, (0, 2): 0.2, (0, 3): 0.3, (1, 0): 0.9, (1, 1): -0.4, (1, 2): 0.0, (1, 3): 0.45}


@pytest.mark.parametrize(
    ("size", "count", "kept"),
    [
        (1, 0, set()),
        (1, 3, {(1, 0), (0, 1), (1, 3)}),
        (2, 2, {(0, 0), (0, 1)}),
        (2, 3, {(0, 0), (0, 1)}),  # a group is kept whole or not at all
        (2, 4, {(0, 0), (0, 1), (0, 2), (0, 3)}),
        (4, 4, {(0, 0), (0, 1), (0, 2), (0, 3)}),
        (1, 99, set(SCORES)),
    ],
)
def test_the_best_heads_or_groups_are_kept(size, count, kept):
    assert best_heads(SCORES, count, {0: size, 1: size}) == kept


def test_ties_go_to_the_earlier_head():
    assert best_heads(dict.fromkeys([(1, 0), (0, 1), (0, 0)], 1.0), 2, {0: 1, 1: 1}) == {(0, 0), (0, 1)}


def test_layers_may_differ_in_the_size_of_their_groups():
    units = ranked_units(SCORES, {0: 4, 1: 1})
    assert units[0] == [(0, 0), (0, 1), (0, 2), (0, 3)]
    assert [len(unit) for unit in units[1:]] == [1, 1, 1, 1]
