"""The compiled product of a few rows, between forbidden pages: weights are walked through by their addresses alone."""

import random

import torch

from attngap.ops.thin import thin_product
from attngap.ops.thin.compiled import KINDS, MOST_ROWS, WIDTH, ThinWeight
from tests.trust.fences import Fences
from tests.trust.outcome import Outcome


def batch(number: int, calls: int = 40) -> Outcome:
    """Products of random sizes; each must be what it is in ordinary memory, to the bit."""
    outcome, draw, fences = Outcome(), random.Random(f"products {number}"), Fences(8)
    for i in range(calls):
        kind, width, outputs = draw.choice(KINDS), WIDTH * draw.randint(1, 20), draw.randint(1, 50)
        rand = torch.Generator().manual_seed(draw.randrange(2**32))
        given = [torch.randn(draw.randint(1, MOST_ROWS), width, generator=rand)]
        given += [torch.randn(outputs, width, generator=rand)]
        given += [torch.randn(outputs, generator=rand)] * draw.randint(0, 1)
        given = [x.to(kind) for x in given]
        assert ThinWeight(*given[1:], *[None] * (3 - len(given))).takes(given[0])  # else torch would be tried
        fences.at_end = draw.random() < 0.5
        with fences.results():
            found = thin_product(*map(fences.place, given))
        outcome.count("thin_product")
        if not torch.equal(found, thin_product(*given)):
            outcome.faults.append(f"thin_product, call {i} of {number}: differs from ordinary memory")
    return outcome
