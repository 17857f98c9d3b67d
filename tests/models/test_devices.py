"""Everything that is made for a model is made where the model is: shown on a device that refuses to meet the CPU.

The device is pretended (tests/pretended.py), since test machines have none but the CPU; numbers are those of the CPU.
"""

import warnings

import pytest
import torch

import attngap
from attngap.conversion import calibration, long, speed
from attngap.conversion import slices as slices_module
from attngap.conversion.evaluate import Measures
from attngap.explorer.sentence import Sentences
from attngap.heads.forward import forward
from attngap.heads.inputs import layer_inputs
from attngap.heads.replacement import build_replacement
from attngap.models.capture import capture
from attngap.models.mixed import mixed_heads
from attngap.models.plan import Replacement
from attngap.models.stream import Conversation
from attngap.models.swap import empty_cache
from attngap.probes import runs, train
from attngap.probes.spec import make_spec
from attngap.storage.runs import Runs
from tests.conversion.small import TEXT
from tests.pretended import ELSEWHERE, Elsewhere, MixedDevices, SecondDevice, here, move
from tests.zoo import tiny, tokenizer

CONVERT = {"context": 64, "tokens": 256, "steps": 2, "joint": 2, "rounds": 1, "window": 8, "keep": 0.25}
MEASURED = Measures(passages=1, trials=1, contexts=(64, 128), prefill_up_to=64, lengths=(64,), by_length=())


@pytest.fixture(autouse=True)
def _pretended(monkeypatch):
    monkeypatch.setattr(speed, "synchronize", lambda device: None)  # there is nothing to wait for
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*frobenius_norm.*|.*An output with one or more elements.*")
        yield


def test_the_pretended_device_refuses_what_a_real_one_would():
    model = move(tiny())
    tokens = torch.arange(1, 9)[None]
    with SecondDevice():
        assert model.device == ELSEWHERE
        with pytest.raises(MixedDevices, match="embedding mixes devices"):
            model(tokens)
        logits = model(tokens.to(ELSEWHERE)).logits
        with pytest.raises(MixedDevices, match="numpy"):
            logits.detach().numpy()
        with pytest.raises(MixedDevices, match="mul mixes"):
            logits * torch.arange(96.0)
        with pytest.raises(MixedDevices, match="generator"):
            torch.randn(3, device=logits.device, generator=torch.Generator())
    torch.testing.assert_close(here(logits), tiny()(tokens).logits)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_a_diagnosis_happens_where_the_model_is(name):
    def run(model):
        return attngap.diagnose(model, tokenizer(), TEXT, context=64, passages=2, window=8, ranks=(4,), verify=2)

    with SecondDevice():
        found = run(move(tiny(name)))
    for one, other in zip(found.heads, run(tiny(name)).heads, strict=True):
        assert one.verdict == other.verdict
        assert one.damage == pytest.approx(other.damage, rel=1e-3)
        assert one.entropy == pytest.approx(other.entropy, rel=1e-4)
        assert one.fit == pytest.approx(other.fit, rel=1e-3)


@pytest.mark.parametrize("slices", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_conversion_happens_where_the_model_is(name, slices, monkeypatch):
    if slices:
        monkeypatch.setattr(long, "ROWS", 16)
        monkeypatch.setattr(calibration, "FACTS", 2)  # a token a letter: eight would not fit
        # Recomputed inside a backward pass, tensors of a pretended device look like the CPU's, and torch minds that.
        monkeypatch.setattr(slices_module, "checkpoint", lambda function, *args, **_: function(*args))

    def run(model):
        return attngap.linearize(model, tokenizer(), None, TEXT, measures=MEASURED, **CONVERT)

    with SecondDevice():
        model = move(tiny(name))
        converted, receipt = run(model)
        assert not [note for note in receipt.notes if "could not be measured" in note]
        assert ("reading long passages" in receipt.seconds) == (slices and name == "llama")
        assert all(isinstance(x, Elsewhere) for x in (*converted.parameters(), *converted.buffers()))
        tokens = torch.arange(1, 41)[None].to(ELSEWHERE)
        cache = empty_cache(converted)
        with torch.no_grad():
            pieces = [converted(part, past_key_values=cache).logits for part in tokens.split([37, 1, 1, 1], 1)]
            whole = converted(tokens, use_cache=False).logits
    torch.testing.assert_close(here(torch.cat([here(x) for x in pieces], 1)), here(whole), atol=2e-4, rtol=2e-4)
    plain, other = run(tiny(name))
    assert receipt.keep == other.keep
    assert receipt.fit_error["median"] == pytest.approx(other.fit_error["median"], rel=0.02)
    assert [part.keep.tolist() for part in mixed_heads(plain).values()] == [
        part.keep.tolist() for part in mixed_heads(converted).values()
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_layer_reads_is_where_the_model_is_even_without_numbers(dtype):
    """On the meta device, with shapes only; tests/models/test_meta.py runs converted models there."""
    model = tiny().to("meta", dtype)
    seen = []
    with torch.no_grad(), capture(model, seen.append):
        logits = model(torch.ones(1, 40, dtype=torch.long, device="meta")).logits
    assert (logits.device.type, logits.dtype) == ("meta", dtype)
    for call in seen:
        (one,) = layer_inputs(call)
        parts, made = (call.q, call.k, call.v, call.output), build_replacement(one, Replacement(window=8, sinks=2))[0]
        assert {(x.device.type, x.dtype) for x in parts} == {("meta", torch.float32)}
        assert {x.device.type for x in (*made.parameters(), *made.buffers())} == {"meta"}
    assert len(seen) == 2


MECHANISMS = ("softmax", "elu", "gla", "gated-delta", "kda", "hybrid", "retention", "mala")


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("task", ["mqar", "icl-regression"])
def test_a_probe_is_trained_on_the_device(task, mechanism, monkeypatch, tmp_path):
    """Weights are drawn on the CPU, so that every device starts from the same; nothing else stays there."""
    trained_on = []

    def spied(model, *args, **options):
        trained_on.append({type(x) for x in (*model.parameters(), *model.buffers())})
        return train.train(model, *args, **options)

    def run():
        loop = {"steps": 4, "batch": 4, "test": 8, "validation": 8, "evaluate_every": 2}
        sizes = {"width": 16, "heads": 2, "positions": "rotary"}
        specs = [make_spec(task, mechanism, train=loop, model=sizes)]
        with Runs(tmp_path / f"{len(trained_on)}.db") as stored:
            (done,) = runs.run_all(specs, stored, sweep="s", device="mps", checkpoints=tmp_path / "checkpoints")
            assert done.error is None, done.error
            (record,) = stored.records()
        return record

    monkeypatch.setattr(runs, "train", spied)
    monkeypatch.setattr(runs, "device_named", lambda _name: torch.device("cpu"))
    plain = run()
    monkeypatch.setattr(runs, "device_named", lambda _name: ELSEWHERE)
    with SecondDevice():
        found = run()
    assert trained_on[0] <= {torch.nn.Parameter, torch.Tensor}
    assert all(issubclass(kind, Elsewhere) for kind in trained_on[1])
    assert found.provenance["device"] == "mps"
    assert found.result["loss"] == pytest.approx(plain.result["loss"], rel=1e-3)
    assert found.result["score"] == pytest.approx(plain.result["score"], rel=1e-3)


def test_a_model_is_asked_on_its_device():
    with SecondDevice():
        found = attngap.probe("copy", move(tiny()), tokenizer=tokenizer(), sequences=4)
    assert found.score == attngap.probe("copy", tiny(), tokenizer=tokenizer(), sequences=4).score


def test_conversations_and_the_explorer_speak_to_the_device():
    words = tokenizer()
    with SecondDevice():
        model = move(tiny())
        steps = list(Conversation(model, words).reply([{"role": "user", "content": "the cat"}], limit=3))
        heads = Sentences(model, words, "tiny").heads("the cat sat")["heads"]
        assert forward(model, torch.ones(1, 4, dtype=torch.long)).logits.device == ELSEWHERE
    same = list(Conversation(tiny(), words).reply([{"role": "user", "content": "the cat"}], limit=3))
    assert [step.text for step in steps] == [step.text for step in same]
    for one, other in zip(heads, Sentences(tiny(), words, "tiny").heads("the cat sat")["heads"], strict=True):
        assert one["entropy"] == pytest.approx(other["entropy"], rel=1e-4)
