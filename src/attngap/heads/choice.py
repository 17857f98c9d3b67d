"""Choose the heads that keep softmax by their scores."""

from collections.abc import Mapping

HeadIndex = tuple[int, int]  # layer, head
Keep = frozenset[HeadIndex]


def ranked_units(scores: Mapping[HeadIndex, float], group: Mapping[int, int]) -> list[list[HeadIndex]]:
    """Units of `group[layer]` neighboring heads that stay or go together, the highest sum of scores first.

    >>> ranked_units({(0, 0): 1.0, (0, 1): 0.0, (0, 2): 0.4, (0, 3): 0.4}, {0: 2})
    [[(0, 0), (0, 1)], [(0, 2), (0, 3)]]
    """
    units: dict[HeadIndex, list[HeadIndex]] = {}
    for layer, head in sorted(scores):
        units.setdefault((layer, head // group[layer]), []).append((layer, head))
    return sorted(units.values(), key=lambda unit: (-sum(scores[head] for head in unit), unit))


def best_heads(scores: Mapping[HeadIndex, float], count: int, group: Mapping[int, int]) -> Keep:
    """The units of heads with the highest scores, as long as no more than `count` heads are kept."""
    kept: list[HeadIndex] = []
    for unit in ranked_units(scores, group):
        if len(kept) + len(unit) <= count:
            kept += unit
    return frozenset(kept)
