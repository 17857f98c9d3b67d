"""Memory and disk beyond the weights, from what each stage holds at its peak.

How many copies of a thing a stage holds was read off random-weight Llamas of two widths (docs/how-to/large-models.md).
"""

import dataclasses

import torch

from attngap.conversion.long import ROWS
from attngap.conversion.options import ConversionOptions
from attngap.conversion.run import LONGEST
from attngap.costs.shape import ModelShape
from attngap.diagnosis.options import MAX_TOKENS, DiagnosisOptions
from attngap.diagnosis.stages import STRESS_DRAWS
from attngap.heads.chain import WHOLE_GRAPH
from attngap.mechanisms.catalogue import mechanism
from attngap.models.plan import Replacement
from attngap.storage.overflow import LIMIT

SINGLE, HALF = 4, 2  # bytes of a number
LIBRARIES = 2 * 10**8  # compiled kernels and what a run imports
LOGITS = 3.2  # copies of a passage's logits: themselves, their softmax, what is compared
WEIGHTS = 3.3  # copies of a layer's attention weights, a head's own among them
HEAD_SQUARES = 35  # float32 squares of one head whose bounds are being computed
PROCESS = 3 * 10**8  # a process that computes bounds
LAYER_COPIES = 8  # of a layer's queries while it is fitted
SLICE_LOGITS, SLICES = 10, 6
MORE = 4  # passages for damage only


@dataclasses.dataclass(frozen=True)
class Space:
    """Bytes beyond the weights."""

    memory: int
    disk: int


def diagnosis_space(shape: ModelShape, options: DiagnosisOptions, size: int) -> Space:
    """Of a diagnosis of a model whose numbers take `size` bytes."""
    t, ranks = min(options.context, MAX_TOKENS), len(options.ranks)
    queries = SINGLE * shape.heads * t * shape.dim
    squares = SINGLE * shape.heads * t * t
    mlp = size * t * shape.layer_parameters // shape.hidden
    batch = (1 + options.passages) * (LAYER_COPIES * queries + mlp)
    workers = min(torch.get_num_threads(), shape.heads)
    head = HEAD_SQUARES * SINGLE * t * t
    bounds = WEIGHTS * squares + 3 * ranks * queries + (workers * (head + PROCESS) if workers > 1 else head)
    states = size * shape.layers * t * shape.hidden
    damage = LOGITS * SINGLE * t * shape.vocabulary + states + max(2 * squares, 3 * mlp)
    memory = LIBRARIES + (2 * squares if options.quick else max(batch + bounds, damage))
    rows = (1 + options.passages) * options.context * SINGLE
    deep = 2 * ranks * t * shape.dim * HALF + 2 * 64 * 64 + 3 * 64 * shape.dim * SINGLE
    damages = SINGLE * t * (MORE + options.passages + STRESS_DRAWS + (1 + STRESS_DRAWS) * ranks)
    disk = shape.layers * shape.heads * (rows if options.quick else rows + deep + damages)
    return Space(int(memory), int(disk))


def conversion_space(shape: ModelShape, options: ConversionOptions, size: int) -> Space:
    """Of a conversion."""
    length = min(options.length or LONGEST, shape.positions or LONGEST)
    long = length + max(length // 2, options.context) if length >= 2 * options.context else 0
    short = options.tokens // options.context * options.context
    both, keys = 2 * (shape.heads + shape.kv_heads) * shape.dim, 2 * shape.kv_heads * shape.dim
    kept = shape.replaceable * HALF * (long * both + (long + short) * keys if long else 0)
    wide = shape.layer_parameters // shape.hidden
    side_by_side = min(4, torch.get_num_threads())
    fitting = side_by_side * 2.5 * SINGLE * (long + short) * both + size * short * wide
    rows = ROWS if long else options.context
    graph = rows * (2 * wide + 4 * shape.hidden) * SINGLE + (length + rows) * keys * SINGLE
    whole = shape.parameters * size <= WHOLE_GRAPH
    layers = shape.layers * (graph if whole else rows * shape.hidden * size) + (0 if whole else graph)
    choosing = (SLICE_LOGITS * SINGLE + SLICES * HALF) * rows * shape.vocabulary + layers
    memory = LIBRARIES + max(fitting, choosing) + min(kept, LIMIT)
    near = Replacement(window=max(1, options.window), sinks=options.sinks)
    with torch.device("meta"):
        part = mechanism("hybrid", shape.heads, shape.dim, kv_heads=shape.kv_heads, **near.options())
    adapter = shape.replaceable * sum(x.nbytes for x in part.state_dict().values())
    return Space(int(memory), int(3 * adapter + max(0, kept - LIMIT)))
