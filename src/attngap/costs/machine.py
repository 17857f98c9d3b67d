"""How fast this machine multiplies and reads, measured once and kept."""

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from attngap.costs.shape import ModelShape
from attngap.models.gguf import cache_folder
from attngap.models.placement import synchronize
from attngap.models.products import quick_products
from attngap.progress import progress
from attngap.provenance import provenance
from attngap.storage.files import write_text

TOKENS = 512  # rows of a timed product
ENTRIES = 2**25  # of a timed matrix, at most: larger ones are as fast
BYTES = 2**28  # read to time memory: more than any cache holds
TRIES = 3


@dataclasses.dataclass(frozen=True)
class Rates:
    """Of one device in one precision."""

    products: float  # multiplications and additions a second, in a product of many rows
    products_backward: float
    bytes_read: float  # bytes of weights a second, in a product of one row
    hashed: float  # bytes a second


def measure_rates(shape: ModelShape, *, dtype: torch.dtype, device: torch.device) -> Rates:
    """At a layer's own shapes, as far as `ENTRIES` go."""
    width = shape.hidden
    wide = max(16, min(shape.layer_parameters // (3 * width), ENTRIES // width))
    with progress("timing this machine", 3, quiet=False) as advance:
        up, down = (
            nn.Linear(*sizes, bias=False, device=device, dtype=dtype) for sizes in ((width, wide), (wide, width))
        )
        for part in (up, down):
            part.requires_grad_(False)
        x = torch.randn(TOKENS, width, device=device, dtype=dtype, requires_grad=True)
        work = 4.0 * TOKENS * width * wide

        def forward() -> torch.Tensor:
            return down(nn.functional.silu(up(x)))

        with quick_products(up, down):  # as diagnoses and conversions multiply
            ahead = fastest(forward, device)
            both = fastest(lambda: torch.autograd.grad(forward().sum(), x), device)
        advance()
        rows = BYTES // (width * x.element_size())
        weights, one = torch.randn(rows, width, device=device, dtype=dtype), x[:1].detach()
        read = weights.nbytes / fastest(lambda: nn.functional.linear(one, weights), device)
        advance()
        data = bytes(2**25)
        hashed = len(data) / fastest(lambda: hashlib.sha256(data).digest(), torch.device("cpu"))
        advance()
    return Rates(work / ahead, work / max(both - ahead, ahead / 2), read, hashed)


def fastest(function: Callable[[], Any], device: torch.device) -> float:
    """Seconds of the best of a few tries: others may use the machine. In one thread its own time counts."""
    clock = time.process_time if torch.get_num_threads() == 1 and device.type == "cpu" else time.perf_counter
    found = []
    for _ in range(TRIES + 1):
        start = clock()
        function()
        synchronize(device)
        found.append(clock() - start)
    return max(min(found[1:]), 1e-9)


def remembered(key: dict[str, Any], measure: Callable[[], dict[str, Any]], *, anew: bool = False) -> dict[str, Any]:
    """What was measured under this key on this machine, with these versions; measured now where it was not yet."""
    made = provenance()
    key = key | {"machine": made["machine"], "versions": made["versions"], "threads": torch.get_num_threads()}
    name = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()[:16]
    path = cache_folder() / "costs" / f"{name}.json"
    if not anew:
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            return kept["found"]
        except (OSError, ValueError, KeyError, TypeError):  # not there yet, or damaged: measured again
            pass
    found = measure()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps({"key": key, "found": found}, indent=1, default=str) + "\n")
    except OSError:  # a home that cannot be written to: it is measured each time
        pass
    return found
