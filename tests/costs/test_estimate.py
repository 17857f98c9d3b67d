"""Costs follow from what was rehearsed by counting, and rehearsals count what the real thing does."""

import pytest
import torch

import attngap
from attngap.conversion.options import ConversionOptions
from attngap.costs import estimate as module
from attngap.costs.machine import Rates, remembered
from attngap.costs.rehearsal import Passes, Rehearsal, counting, letters, rehearse_diagnosis, text_of
from attngap.costs.shape import shape_of
from attngap.diagnosis.options import DiagnosisOptions
from attngap.errors import AttngapError
from attngap.models.cache import cache_bytes
from attngap.models.swap import empty_cache
from tests import zoo
from tests.conversion.small import TEXT

CPU = torch.device("cpu")
CONFIG = zoo.DECODERS["llama"][1]
LOOKED = DiagnosisOptions(context=64, passages=1, ranks=(4,), window=8)
CHANGED = ConversionOptions(context=64, tokens=256, steps=2, joint=2, rounds=1, window=8)
RATES = Rates(products=1e3, products_backward=5e2, bytes_read=1e4, hashed=1e6)
PASSES = Passes(forward=1000.0, backward=10.0, reads=3.0, head_forward=50.0, head_backward=5.0, head_reads=2.0)
STAGES = {"diagnose": {"statistics": 0.25, "replacements": 0.75}, "linearize": {"fitting layers": 0.5, "choosing": 0.5}}


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTNGAP_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def known(monkeypatch):
    """Rehearsals whose results are given; counts how often they are asked for."""
    asked = []

    def rehearse(verb):
        def run(*_args, **_options):
            asked.append(verb)
            return Rehearsal(0.5, 7.0, PASSES, STAGES[verb])

        return run

    monkeypatch.setattr(module, "measure_rates", lambda *_, **__: RATES)
    monkeypatch.setattr(module, "rehearse_diagnosis", rehearse("diagnose"))
    monkeypatch.setattr(module, "rehearse_conversion", rehearse("linearize"))
    return asked


def run(**options):
    return attngap.estimate(CONFIG, diagnosis=LOOKED, conversion=CHANGED, contexts=(256,), **options)


def test_seconds_are_key_heads_and_products_and_what_is_done_once(known):
    shape, found = shape_of(CONFIG), run()
    layer, head = shape.layer_parameters, shape.head_parameters
    products = 2 * (1000 * 2 * layer + 50 * head) / 1e3 + 2 * (10 * 2 * layer + 5 * head) / 5e2
    products += 4 * (3 * 2 * layer + 2 * head) / 1e4
    groups = 2 * shape.kv_heads
    once = 7.0 + products
    assert found.diagnose.seconds == pytest.approx(0.5 * groups + once + 2 * shape.parameters / 1e6)
    assert found.linearize.seconds == pytest.approx(0.5 * groups + once + 12 * shape.parameters / 1e6)
    assert found.diagnose.memory == found.weights + found.diagnose.beyond
    assert found.weights == 4 * shape.parameters


def test_workers_share_what_jobs_share_and_nothing_else(known):
    one, four = run(), run(workers=4)
    groups = 2 * CONFIG.num_key_value_heads
    shape = shape_of(CONFIG)
    assert four.diagnose.stages["statistics"] == pytest.approx(one.diagnose.stages["statistics"] / 2)  # two passages
    assert four.diagnose.stages["replacements"] == pytest.approx(one.diagnose.stages["replacements"] / 4)
    # The model runs here over three passages of 64 tokens, to hand its layers out.
    walked, hashed = 2 * 3 * 64 * 2 * shape.layer_parameters / 1e3, 2 * shape.parameters / 1e6
    whole, shared = (each.diagnose.stages["the model"] - hashed - walked for each in (one, four))
    assert shared == pytest.approx(whole / 2)
    assert one.linearize.seconds - four.linearize.seconds == pytest.approx(0.5 * 0.5 * groups * 3 / 4)
    with pytest.raises(AttngapError, match="workers must be at least 1, got 0"):
        run(workers=0)


def test_a_machine_is_rehearsed_once_unless_told(known):
    run()
    run(workers=2)
    assert known == ["diagnose", "linearize"]
    run(anew=True)
    assert known == ["diagnose", "linearize"] * 2
    attngap.estimate(CONFIG, diagnosis=LOOKED.but(context=48), conversion=CHANGED)
    assert known == [*["diagnose", "linearize"] * 2, "diagnose"]


def test_what_is_remembered_and_damaged_is_measured_again(tmp_path):
    assert remembered({"a": 1}, lambda: {"x": 1}) == {"x": 1}
    assert remembered({"a": 1}, lambda: {"x": 2}) == {"x": 1}
    assert remembered({"a": 2}, lambda: {"x": 3}) == {"x": 3}
    for file in (tmp_path / "cache" / "costs").iterdir():
        file.write_text("{")
    assert remembered({"a": 1}, lambda: {"x": 4}) == {"x": 4}


def test_what_goes_through_a_layer_is_counted_in_both_directions():
    model, passes, ids = zoo.tiny("llama"), Passes(), zoo.tokens(2, 24)
    with counting(passes, zoo.VOCABULARY, 2):
        logits = model(ids).logits
        assert (passes.forward, passes.head_forward, passes.backward) == (48, 48, 0)
        logits.sum().backward()
        with torch.no_grad():
            model(ids[:1, :2])
    model(ids)
    assert passes == Passes(48.0, 48.0, 1.0, 48.0, 48.0, 1.0)


def test_a_rehearsal_counts_what_a_diagnosis_of_the_model_does():
    shape, real = shape_of(CONFIG), Passes()
    found = rehearse_diagnosis(shape, LOOKED, dtype=torch.float32, device=CPU, text=text_of(4000))
    with counting(real, shape.vocabulary, shape.layers):
        attngap.diagnose(zoo.tiny("llama"), letters(shape.vocabulary), text_of(4000), options=LOOKED)
    assert found.passes.backward == pytest.approx(real.backward)
    assert real.backward > 0
    assert found.passes.head_backward == real.head_backward
    assert found.passes.forward == pytest.approx(real.forward, rel=0.1)  # the worst heads are others, so are replays
    assert sum(found.stages.values()) == pytest.approx(1)
    assert found.key_head >= 0
    assert found.once >= 0


def test_the_cache_told_is_the_cache_that_a_converted_model_has(known):
    tokens = 256
    model = zoo.tiny("llama")
    converted, _ = attngap.linearize(model, zoo.tokenizer(), None, TEXT, options=CHANGED.but(keep=0.0), measured=False)
    for each, name in ((model, "cache"), (converted, "converted_cache")):
        cache = empty_cache(each)
        with torch.no_grad():
            each(zoo.tokens(1, tokens), past_key_values=cache, use_cache=True)
        told = getattr(run(keep=0.0).gains[0], name)
        assert told == pytest.approx(cache_bytes(cache), rel=0.02)


def test_a_device_that_is_not_there(known):
    with pytest.raises(AttngapError, match="No device 'cuda:99'"):
        run(device="cuda:99")
    assert not known
