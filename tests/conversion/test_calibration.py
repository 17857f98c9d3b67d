"""Passages that a conversion is fitted to."""

import pytest
import torch

from attngap.conversion.calibration import repeats
from tests.zoo import tokenizer


@pytest.mark.parametrize(("context", "beyond"), [(64, 8), (64, 20), (64, 100), (50, 3)])
def test_repeats_come_from_beyond_the_window_where_there_is_room(context, beyond):
    for seed in range(8):
        tokens = repeats(tokenizer(), context=context, beyond=beyond, seed=seed)[0]
        assert len(tokens) == context
        periods = [p for p in range(2, context // 2 + 1) if torch.equal(tokens[p:], tokens[:-p])]
        assert periods
        assert periods[0] > min(beyond, context // 2 - 1)
