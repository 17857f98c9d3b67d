"""Certificates read off one attention matrix: how sharply it selects, and how near any linear attention can come.

Everything takes `(..., n, n)` or `(..., rows, keys)`, batched over leading axes, and computes in float64. Bounds are
about one head's weights. They say nothing about the network around it.
"""

from attngap.theory.rank_bounds import Ceiling, Floor, ceiling, floor, weighted_floor
from attngap.theory.recall import Retrieval, crosstalk, retrieval
from attngap.theory.selectivity import Selection, selection

__all__ = [
    "Ceiling",
    "Floor",
    "Retrieval",
    "Selection",
    "ceiling",
    "crosstalk",
    "floor",
    "retrieval",
    "selection",
    "weighted_floor",
]
