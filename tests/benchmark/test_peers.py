"""Peers compute the same function as ours: a benchmark of different functions would mean nothing."""

import pytest
import torch

from attngap.benchmark import peers
from attngap.benchmark.cases import OURS, cases


@pytest.mark.parametrize("case", cases(), ids=lambda case: f"{case.op}, {case.form}")
def test_peers_agree_with_ours(case):
    inputs = case.inputs(2, 300, 16)
    ours = case.implementations[OURS](*inputs)
    for name, implementation in case.implementations.items():
        if name in ("sdpa", OURS) or peers.missing(name):
            continue  # softmax is another function: the yardstick, not a peer of the same kind
        theirs = implementation(*inputs) * (16**0.5 if name == "transformers" else 1)  # it divides q by sqrt(d)
        torch.testing.assert_close(theirs, ours, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def test_a_missing_peer_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    assert "pip install pytorch-fast-transformers" in (peers.missing("fast-transformers") or "")
    assert peers.missing("sdpa") is None
