import pytest
import torch
from torch.nn import functional as F

from attngap.mechanisms.gates import LogSigmoidGate, StepSizeGate, WriteGate, retention_decay

X = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("gate", "shape"),
    [
        (LogSigmoidGate("gla", 12, 3, 4), (2, 3, 5, 4)),
        (StepSizeGate("ssd", 12, 3), (2, 3, 5)),
        (StepSizeGate("kda", 12, 3, 4, rank=4), (2, 3, 5, 4)),
    ],
)
def test_decays_are_logarithms_of_numbers_below_one(gate, shape):
    for x in (X, 1e3 * X):
        decay = gate(x)
        assert decay.shape == shape
        assert decay.isfinite().all()
        assert (decay <= 0).all()


def test_write_strength_is_between_zero_and_one():
    beta = WriteGate("delta", 12, 3)(X)
    assert beta.shape == (2, 3, 5)
    assert ((beta > 0) & (beta < 1)).all()


def test_gla_gate_is_the_papers():
    gate = LogSigmoidGate("gla", 12, 3, 4)
    logit = gate.up(gate.down(X))  # (b, t, h d)
    torch.testing.assert_close(gate(X)[:, 1], F.logsigmoid(logit[..., 4:8]) / 16)


@pytest.mark.parametrize("gate", [StepSizeGate("ssd", 12, 4), StepSizeGate("kda", 12, 2, 4, rank=4)])
def test_step_sizes_start_evenly_between_a_thousandth_and_a_tenth(gate):
    dt = F.softplus(gate.bias).view(-1, 4)
    wanted = 10 ** torch.tensor([-2.75, -2.25, -1.75, -1.25])
    torch.testing.assert_close(dt, wanted.expand_as(dt))
    assert (gate.log_rate == 0).all()


def test_half_precision_gates_are_computed_in_float32():
    gate = StepSizeGate("ssd", 12, 3).bfloat16()
    found = gate(X.bfloat16())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, gate.float()(X.bfloat16().float()))


def test_retention_decays():
    gamma = retention_decay(8).exp()
    torch.testing.assert_close(gamma, torch.tensor([1 - 2.0 ** (-5 - h) for h in range(8)]))
