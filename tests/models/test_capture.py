"""Watching a model leaves its outputs and itself as they were, on every family."""

import threading

import pytest
import torch
import transformers as tf

from attngap.errors import AttngapError
from attngap.models.capture import capture
from tests import zoo
from tests.zoo_architectures import architectures

FAMILIES = sorted(zoo.FAMILIES)


def outputs(model, ids, mask=None):
    with torch.no_grad():
        found = model(**zoo.inputs(model, ids, mask))
    logits = getattr(found, "logits", None)
    return found.last_hidden_state if logits is None else logits


def padded(side: str) -> tuple[torch.Tensor, torch.Tensor]:
    ids, mask = zoo.tokens(2, 24), torch.ones(2, 24, dtype=torch.long)
    mask[1, slice(0, 7) if side == "left" else slice(17, None)] = 0
    return ids, mask


def watch(model, ids, mask=None):
    seen = []
    with capture(model, seen.append):
        after = outputs(model, ids, mask)
    return seen, after


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_outputs_are_the_same_to_the_bit(family, side):
    model = zoo.tiny(family)
    ids, mask = padded(side) if side != "none" else (zoo.tokens(2, 24), None)
    model.set_attn_implementation("sdpa")
    before = outputs(model, ids, mask)
    seen, during = watch(model, ids, mask)
    assert torch.equal(before, during)
    assert torch.equal(before, outputs(model, ids, mask))
    assert len(seen) > 1


@pytest.mark.parametrize("family", FAMILIES)
def test_calls_are_numbered_and_cross_attention_is_apart(family):
    model = zoo.tiny(family)
    seen, _ = watch(model, zoo.tokens(1, 12))
    own = [call.layer for call in seen if not call.cross]
    cross = [call.layer for call in seen if call.cross]
    layers = {"albert": 3, "t5": 4}.get(family, 2)
    assert own == list(range(layers))  # ALBERT calls one module three times
    assert cross == ([0, 1] if family == "t5" else [])
    again, _ = watch(model, zoo.tokens(1, 12))
    assert [call.layer for call in again] == [call.layer for call in seen]


def test_a_call_carries_what_attention_read():
    model = zoo.tiny("sliding")
    seen, _ = watch(model, zoo.tokens(2, 24))
    call = seen[0]
    assert call.q.shape == (2, 4, 24, 8)
    assert call.k.shape == (2, 2, 24, 8)
    assert call.window == 10
    assert call.causal
    assert call.mask is not None
    logits = call.q @ call.k.repeat_interleave(2, 1).mT * call.scale
    weights = logits.masked_fill(~call.mask, -torch.inf).softmax(-1)
    assert torch.allclose(weights @ call.v.repeat_interleave(2, 1), call.output, atol=1e-5)


def state_of(model):
    hooks = [(len(m._forward_pre_hooks), len(m._forward_hooks)) for m in model.modules()]
    return model.config._attn_implementation, hooks, {name: p.clone() for name, p in model.state_dict().items()}


def same(a, b) -> bool:
    return a[:2] == b[:2] and all(torch.equal(a[2][name], b[2][name]) for name in a[2])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_the_model_is_left_as_it_was_found_also_after_an_exception(family, implementation):
    model = zoo.tiny(family)
    model.set_attn_implementation(implementation)
    before = state_of(model)

    def fail(call):
        if call.layer == 1:
            raise KeyError("observer")

    with pytest.raises(KeyError, match="observer"), capture(model, fail):
        outputs(model, zoo.tokens(1, 8))
    assert same(before, state_of(model))
    seen, _ = watch(model, zoo.tokens(1, 8))
    assert seen[0].layer == 0
    assert same(before, state_of(model))


def test_a_returned_tensor_replaces_the_output():
    model = zoo.tiny("llama")
    ids = zoo.tokens(1, 8)
    before = outputs(model, ids)
    with capture(model, lambda call: call.output.clone()):
        assert torch.equal(outputs(model, ids), before)
    with capture(model, lambda call: torch.zeros_like(call.output) if call.layer == 1 else None):
        changed = outputs(model, ids)
    assert not torch.allclose(changed, before)


def test_two_models_are_watched_at_once():
    first, second = zoo.tiny("llama"), zoo.tiny("gpt2")
    here, there = [], []
    with capture(first, here.append), capture(second, there.append):
        outputs(first, zoo.tokens(1, 8))
        outputs(second, zoo.tokens(1, 9))
    assert {call.q.shape[2] for call in here} == {8}
    assert {call.q.shape[2] for call in there} == {9}


def test_a_second_capture_of_one_model_is_refused():
    model = zoo.tiny("llama")
    with capture(model, lambda call: None), pytest.raises(AttngapError, match="being captured already"):
        capture(model, lambda call: None).__enter__()


def test_softcap_and_learned_sinks_are_refused_by_name():
    gemma = tf.Gemma2ForCausalLM(tf.Gemma2Config(**zoo.GROUPED))
    # Newer transformers say beforehand that SDPA cannot, older ones hand softcap to it.
    refused = r"Gemma2ForCausalLM has no SDPA attention.*Handled: plain, grouped-query|Gemma2Attention uses 'softcap'"
    with pytest.raises(AttngapError, match=refused), capture(gemma, lambda call: None):
        gemma(zoo.tokens(1, 8))
    model = zoo.tiny("llama")
    for name in ("softcap", "s_aux"):
        with pytest.raises(AttngapError, match=f"LlamaAttention uses '{name}'"), capture(model, lambda call: None):
            model(zoo.tokens(1, 8), **{name: 30.0})


def test_a_model_without_the_interface_is_refused():
    model = tf.BloomForCausalLM(tf.BloomConfig(vocab_size=96, hidden_size=32, n_layer=1, n_head=4))
    with pytest.raises(AttngapError, match="does not use transformers' attention interface"):
        capture(model, lambda call: None).__enter__()


def test_other_threads_are_computed_and_not_seen():
    model = zoo.tiny("llama")
    exact = model(zoo.tokens(1, 16)).logits
    seen, found = [], []

    def observe(call):
        seen.append(call.layer)
        if call.layer == 0:
            other = threading.Thread(target=lambda: found.append(model(zoo.tokens(1, 16)).logits))
            other.start()
            other.join()

    with capture(model, observe):
        model(zoo.tokens(1, 16))
    assert seen == [0, 1]
    assert torch.equal(found[0], exact)


def test_a_second_capture_of_the_same_model_is_refused_and_harms_nothing():
    model = zoo.tiny("llama")
    with capture(model, lambda call: None):
        for other in (model, model.base_model):
            with pytest.raises(AttngapError, match="is being captured already"), capture(other, lambda call: None):
                pass
    with (
        capture(model.base_model, lambda call: None),
        pytest.raises(AttngapError, match="is being captured already"),
        capture(model, lambda call: None),
    ):
        pass
    assert model.config._attn_implementation == "sdpa"
    calls = []
    with capture(model, calls.append):
        model(zoo.tokens(1, 16))
    assert [call.layer for call in calls] == [0, 1]


def test_many_threads_on_one_model_leave_it_usable():
    model = zoo.tiny("llama")
    exact = model(zoo.tokens(1, 16)).logits
    errors = []

    def use():
        for _ in range(10):
            try:
                with capture(model, lambda call: None):
                    model(zoo.tokens(1, 16))
            except AttngapError as error:
                errors.append(str(error))

    threads = [threading.Thread(target=use) for _ in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert all("is being captured already" in error for error in errors)
    assert torch.equal(model(zoo.tokens(1, 16)).logits, exact)
    assert model.config._attn_implementation == "sdpa"


def test_two_models_of_one_config_do_not_disturb_each_other():
    model = zoo.tiny("llama")
    other = type(model)(model.config).eval()
    exact, seen = other(zoo.tokens(1, 16)).logits, []
    with capture(model, lambda call: seen.append(call.layer)):
        assert torch.equal(other(zoo.tokens(1, 16)).logits, exact)
        assert other.config._attn_implementation == "sdpa"
    assert not seen


def test_what_the_captured_tensors_do_not_explain_is_refused_by_name():
    doge = next(each for each in architectures("causal") if each.name == "doge").build()
    with (
        pytest.raises(AttngapError, match=r"DogeAttention of DogeForCausalLM computes something else than softmax"),
        capture(doge, lambda call: None),
    ):
        doge(zoo.tokens(1, 16))


def test_a_model_without_attention_is_told_so():
    mamba = next(each for each in architectures("causal") if each.name == "mamba").build()
    with pytest.raises(AttngapError, match="has no softmax attention"), capture(mamba, lambda call: None):
        pass


def test_what_a_module_takes_is_what_its_signature_says():
    """Kept by class; a forward of a module's own is asked itself."""
    import inspect

    from attngap.models.capture import _parameter_names
    from attngap.models.products import quick_products

    model = zoo.tiny()
    for part in model.modules():
        assert _parameter_names(part) == tuple(inspect.signature(part.forward).parameters)
    with quick_products(model):
        for part in model.modules():
            assert _parameter_names(part) == tuple(inspect.signature(part.forward).parameters)
    part = next(each for each in model.modules() if type(each).__name__ == "Linear")
    part.forward = lambda encoder_hidden_states: encoder_hidden_states
    assert _parameter_names(part) == ("encoder_hidden_states",)
