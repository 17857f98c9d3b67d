"""A converted model keeps its conversion, and the original keeps its weights."""

import copy
import pickle
import warnings

import pytest
import torch

from attngap.errors import AttngapError
from attngap.models.capture import check_watchable
from attngap.models.mixed import mixed_heads
from attngap.models.swap import swap
from attngap.models.twin import undone
from tests.zoo import VOCABULARY, mechanisms, tiny

TOKENS = torch.randint(VOCABULARY, (1, 24), generator=torch.Generator().manual_seed(1))


def pair():
    model = tiny()
    return model, swap(model, {layer: (m, [1]) for layer, m in mechanisms(model).items()})


def logits(model, **options):
    with torch.no_grad():
        return model(TOKENS, **options).logits


def test_training_the_converted_model_leaves_the_original_alone():
    model, converted = pair()
    before = logits(model)
    assert converted.lm_head.weight.data_ptr() == model.lm_head.weight.data_ptr()
    converted.train()
    step = torch.optim.SGD(converted.parameters(), lr=0.1)
    converted(TOKENS, labels=TOKENS).loss.backward()
    step.step()
    assert torch.equal(logits(model), before)


def test_casting_the_converted_model_leaves_the_original_alone():
    model, converted = pair()
    exact = logits(converted)
    converted.to(torch.bfloat16)
    assert model.dtype == torch.float32
    assert converted.dtype == torch.bfloat16
    assert {p.dtype for part in mixed_heads(converted).values() for p in part.parameters()} == {torch.float32}
    for options in ({"use_cache": False}, {"use_cache": True}):
        found = logits(converted, **options).float()
        assert (found - exact).norm() < 0.1 * exact.norm()


def test_another_attention_would_undo_the_conversion():
    _, converted = pair()
    exact = logits(converted)
    with pytest.raises(AttngapError, match=r"attn_implementation='sdpa' would undo that"):
        converted.set_attn_implementation("sdpa")
    assert torch.equal(logits(converted), exact)
    converted.config._attn_implementation = "eager"
    with pytest.raises(AttngapError, match=r"its config now asks for 'eager' attention"):
        logits(converted)


def test_a_converted_model_is_not_converted_again():
    model, converted = pair()
    with pytest.raises(AttngapError, match="was converted already"):
        swap(converted, {0: (mechanisms(model)[0], [])})


def test_copies_and_pickles_stay_converted():
    _, converted = pair()
    exact = logits(converted)
    for again in (copy.deepcopy(converted), pickle.loads(pickle.dumps(converted))):
        assert type(again) is type(converted)
        assert torch.equal(logits(again), exact)


def test_the_softmax_model_comes_out_again():
    model, converted = pair()
    plain = undone(converted)
    assert type(plain) is type(model)
    assert sorted(name for name, _ in plain.named_parameters()) == sorted(name for name, _ in model.named_parameters())


def test_adapters_of_peft_are_refused():
    from peft import LoraConfig, get_peft_model, inject_adapter_in_model

    model = tiny()
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["q_proj"]), model)
    with pytest.raises(AttngapError, match=r"carries an adapter of peft.*merge_and_unload"):
        swap(model, {})
    with warnings.catch_warnings():  # of transformers, about a name that peft still uses
        warnings.simplefilter("ignore")
        wrapped = get_peft_model(tiny(), LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(AttngapError, match=r"A PeftModel\w* is not a model of transformers.*merge_and_unload"):
        check_watchable(wrapped)  # called before anything else by all that looks at a model
