"""Shared by all tests: one thread count, so that runs repeat to the bit."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
