import math
import os
import subprocess
import sys

import pytest
import torch

from attngap.errors import AttngapError
from attngap.mechanisms.catalogue import catalogue
from attngap.probes import train as trainer
from attngap.probes.mixers import parse
from attngap.probes.model import Decoder, ModelOptions
from attngap.probes.tasks.catalogue import task
from attngap.probes.train import TrainOptions, train

TASK = task("copy", items=4, symbols=4)
SIZES = ModelOptions(width=16, heads=2, layers=1, positions="rotary")
LOOP = TrainOptions(steps=40, batch=16, evaluate_every=10, validation=16, test=32)


def run(text="elu", *, options=LOOP, seed=0, t=TASK, sizes=SIZES, rate=1e-2, **more):
    torch.manual_seed(seed)
    model = Decoder(t, parse(text), sizes)
    return train(model, t, options, learning_rate=rate, seed=seed, **more), model


@pytest.mark.parametrize("name", catalogue())
def test_every_mechanism_lowers_the_loss(name):
    trained, _ = run("hybrid:window=2:sinks=1" if name == "hybrid" else name)
    losses = [loss for _, loss, _ in trained.curve]
    assert losses[-1] < losses[0] - 0.02
    assert trained.steps == 40 or trained.solved


@pytest.mark.parametrize("name", ["icl-regression", "text"])
def test_regression_and_text_lower_the_loss(name):
    t = task(name)
    trained, _ = run("softmax", t=t, options=TrainOptions(steps=60, batch=8, evaluate_every=15, validation=8, test=8))
    assert trained.curve[-1][1] < trained.curve[0][1]


def test_same_seed_same_numbers_other_seed_other_numbers():
    (a, _), (b, _), (c, _) = run(), run(), run(seed=1)
    assert (a.score, a.curve) == (b.score, b.curve)
    assert a.curve != c.curve


def test_reports_every_step_with_loss_and_latest_score():
    seen = []
    trained, _ = run(report=lambda *now: seen.append(now))
    assert [step for step, _, _ in seen] == list(range(1, trained.steps + 1))
    assert [score for _, _, score in seen[:11]] == [None] * 9 + [trained.curve[0][2]] * 2
    mean = sum(loss for _, loss, _ in seen[:10]) / 10
    assert mean == pytest.approx(trained.curve[0][1])
    assert trained.cpu_seconds > 0


class Stop(Exception):
    pass


@pytest.mark.parametrize("name", ["elu", "gated-delta"])
def test_resumed_equals_uninterrupted(tmp_path, name):
    whole, model = run(name)
    file = tmp_path / "run.safetensors"

    def stop(step, loss, score):
        if step == 23:  # between two checkpoints
            raise Stop

    with pytest.raises(Stop):
        run(name, checkpoints=file, report=stop)
    resumed, again = run(name, checkpoints=file)
    assert (resumed.score, resumed.curve, resumed.steps) == (whole.score, whole.curve, whole.steps)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    finished, _ = run(name, checkpoints=file)  # a finished run is read, not trained on
    assert finished.curve == whole.curve


def test_checkpoint_of_another_model(tmp_path):
    file = tmp_path / "run.safetensors"
    run(checkpoints=file)
    with pytest.raises(AttngapError, match=r"run\.safetensors is the checkpoint of another model\. Remove it"):
        run(checkpoints=file, sizes=ModelOptions(width=32, heads=2, layers=1))


def test_stops_when_solved():
    easy = task("copy", items=1, symbols=2)
    options = TrainOptions(steps=2000, batch=32, evaluate_every=20, validation=32, test=32)
    trained, _ = run("softmax", t=easy, options=options)
    assert trained.solved
    assert trained.steps < 2000
    assert trained.score == 1.0


def test_divergence_is_told_not_hidden():
    trained, _ = run(
        rate=1e30, options=TrainOptions(steps=20, batch=4, evaluate_every=5, validation=4, test=4, clip=1e30)
    )
    assert trained.score is None
    assert not trained.solved
    assert all(math.isfinite(loss) for _, loss, _ in trained.curve)


BFLOAT16 = """
import torch
from attngap.probes.probe import probe
loop = {"steps": 20, "batch": 8, "evaluate_every": 10, "validation": 16, "test": 32, "dtype": "bfloat16"}
for name in ("softmax", "gated-delta"):
    result = probe("copy", name, train=loop, learning_rates=[1e-2], task_options={"items": 4, "symbols": 4})
    curve = result.records[0].result["curve"]
    assert curve[-1][1] < curve[0][1], (name, curve)
"""


def test_bfloat16_learns_too():
    """In a process of its own, with oneDNN kept from AMX, which some systems forbid."""
    env = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
    done = subprocess.run([sys.executable, "-c", BFLOAT16], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_bfloat16_where_it_would_crash(monkeypatch):
    monkeypatch.setattr(trainer, "bfloat16_works", lambda: False)
    with pytest.raises(
        AttngapError, match=r"products in bfloat16 crash this machine's torch\. Use dtype float32, or set"
    ):
        run(options=TrainOptions(dtype="bfloat16"))


def test_schedule():
    options = TrainOptions(steps=100, warmup=0.1)
    rates = [options.rate(step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == rates[10] == 1.0
    assert rates[55] == pytest.approx(0.5)
    assert rates[99] < 0.001
    assert rates[10:] == sorted(rates[10:], reverse=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"warmup": 2.0}, "warmup is a share of the steps, from 0 to 1, got 2"),
        ({"dtype": "float16"}, "No dtype of training 'float16'. Did you mean 'bfloat16'"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(AttngapError, match=message):
        TrainOptions(**options)
