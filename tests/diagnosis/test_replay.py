"""A run that skips its first layers gives what the whole run gives, and leaves the model as it was."""

import pytest
import torch

from attngap.diagnosis.replay import Replay
from attngap.heads.forward import forward
from attngap.models.capture import capture
from tests import zoo


@pytest.mark.parametrize(("family", "skips"), [("llama", 1), ("gpt2", 1), ("bert", 1), ("albert", 0), ("t5", 0)])
def test_a_change_in_a_late_layer_needs_only_the_late_layers(family, skips):
    model, ids = zoo.tiny(family), zoo.tokens(1, 12)
    ran = []

    def double(call):
        ran.append(call.layer)
        return 2 * call.output if call.layer + skipped == 1 and not call.cross else None

    skipped = 0
    with torch.no_grad(), capture(model, double):
        whole = forward(model, ids)[0]
    calls = len(ran)
    ran.clear()
    with torch.no_grad():
        replay = Replay(model, ids)
        plain = replay.record(lambda: forward(model, ids))[0]
        with replay.until(1) as skipped, capture(model, double):
            again = forward(model, ids)[0]
        assert torch.equal(forward(model, ids)[0], plain)
    assert skipped == skips
    assert len(ran) == calls - skips
    assert torch.equal(again, whole)
    assert not torch.equal(again, plain)


def test_the_layers_come_back_after_an_error():
    model, ids = zoo.tiny("llama"), zoo.tokens(1, 12)
    with torch.no_grad():
        replay = Replay(model, ids)
        before = replay.record(lambda: forward(model, ids)).logits
        with pytest.raises(KeyError), replay.until(2):
            raise KeyError
        assert torch.equal(forward(model, ids).logits, before)
    assert not any("forward" in vars(layer) for layer in model.model.layers)
