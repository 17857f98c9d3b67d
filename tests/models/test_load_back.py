"""Models that once were saved and never loaded again: those that read images, too, and those with adapters of peft."""

import warnings

import pytest
import torch

import attngap
from attngap.errors import AttngapError
from attngap.models.compat import DynamicCache
from attngap.models.save import Base, conversion_record, set_conversion
from tests.conformance import convert, plan
from tests.models.test_cache import PROMPT
from tests.models.test_cache import converted as converted_decoder
from tests.zoo import tiny, tokenizer
from tests.zoo_architectures import Architecture

TOKENS = torch.arange(4, 34)[None]


@torch.no_grad()
def logits(model):
    return model(input_ids=TOKENS, use_cache=False).logits


def loads_back(model, folder):
    """The converted model and itself after saving: by our loader and by the one of transformers."""
    from attngap.models.shapes import layer_shapes

    words, name = tokenizer(), str(folder / "base")
    model.save_pretrained(name)
    words.save_pretrained(name)
    new, options = convert(model, layer_shapes(model))
    set_conversion(new, conversion_record(new, options, plan(model, name), Base.of(model, name), lora=0))
    attngap.save(new, folder / "new", tokenizer=words)
    assert not torch.equal(logits(new), logits(model))
    return new, attngap.load(folder / "new")[0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "class_name"),
    [
        ("gemma3", "Gemma3ForConditionalGeneration"),
        ("llava", "LlavaForConditionalGeneration"),
        ("qwen2_vl", "Qwen2VLForConditionalGeneration"),
    ],
)
def test_a_model_of_images_and_text(tmp_path, name, class_name):
    model = Architecture(name, "causal", class_name).build()
    new, again = loads_back(model, tmp_path)
    assert type(again).__mro__[1].__name__ == class_name or class_name in [
        each.__name__ for each in type(again).__mro__
    ]
    assert torch.equal(logits(again), logits(new))


def test_an_adapter_of_peft_that_was_put_into_the_weights(tmp_path):
    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings():  # of transformers, about a name that peft still uses
        warnings.simplefilter("ignore")
        wrapped = get_peft_model(tiny(), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
        model = wrapped.merge_and_unload()
    assert not torch.equal(logits(model), logits(tiny()))
    new, again = loads_back(model.eval(), tmp_path)
    assert torch.equal(logits(again), logits(new))


def test_a_folder_of_an_adapter_of_peft_is_refused(tmp_path):
    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        get_peft_model(tiny(), LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path)
    with pytest.raises(AttngapError, match=r"adapter of peft.*merge_and_unload"):
        attngap.load(tmp_path)


@pytest.mark.parametrize("kind", ["static", "offloaded"])
def test_caches_that_cannot_hold_a_state_are_refused(kind):
    model = converted_decoder()
    if kind == "static":
        with pytest.raises(AttngapError, match="Leave cache_implementation unset"):
            model.generate(PROMPT, max_new_tokens=3, cache_implementation=kind)
        return
    cache = DynamicCache(config=model.config)
    cache.offloading = True  # transformers makes such a cache only where there is an accelerator
    with pytest.raises(AttngapError, match=r"keeps its cache where it computes.*Leave cache_implementation unset"):
        model(PROMPT, past_key_values=cache)
