"""A model without its attention, and speeds at lengths a model does not reach."""

import pytest
import torch
from torch.nn import functional as F

from attngap.benchmark import model as speeds
from attngap.benchmark.bound import without_attention
from attngap.benchmark.model import BOUND, model_speeds
from attngap.conversion.choose import convert
from tests.zoo import mechanisms, tiny

TOKENS = torch.randint(5, 60, (1, 24), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def test_all_but_attention_is_computed(monkeypatch):
    """The same as the original whose attention puts out zeros, and no product of queries and keys is left."""
    model = tiny()
    before = model(TOKENS).logits
    found = without_attention(model)

    def refused(*_, **__):
        raise AssertionError("attention was computed")

    monkeypatch.setattr(F, "scaled_dot_product_attention", refused)
    bare = found(TOKENS).logits
    monkeypatch.undo()
    hooks = [part.o_proj.register_forward_pre_hook(lambda _, x: (x[0] * 0,)) for part in attentions(model)]
    torch.testing.assert_close(bare, model(TOKENS).logits, atol=1e-5, rtol=1e-5)
    for hook in hooks:
        hook.remove()
    assert not torch.allclose(bare, before)
    assert torch.equal(model(TOKENS).logits, before), "the original changed"


def attentions(model):
    found = [part for part in model.modules() if hasattr(part, "o_proj")]
    assert found
    return found


def test_prompts_have_a_bound_and_tokens_have_none():
    model = tiny()
    models = {"original": model, "converted": convert(model, mechanisms(model), [(0, 1)])}
    _, decode, prompt = (record for _, record in model_speeds(models, (40,), (64,)))
    assert BOUND not in decode["milliseconds"]
    taken = prompt["processor_milliseconds"]
    assert prompt["processor_times_as_fast_at_most"] == pytest.approx(taken["original"] / taken[BOUND])


def test_a_long_prompt_is_read_at_once_and_in_pieces_and_the_quicker_counts(monkeypatch):
    model, read = tiny(), []
    models = {"original": model, "converted": convert(model, mechanisms(model), [(0, 1)])}
    for each in models.values():
        each.register_forward_pre_hook(
            lambda _, args, given: read.append(given["input_ids"].shape[1]), with_kwargs=True
        )

    def timed(call, device):
        read.clear()
        call()
        return {(64,): 3.0, (24, 24, 16): 2.0}[tuple(read)], 1.0

    monkeypatch.setattr(speeds, "PIECE", 24)
    monkeypatch.setattr(speeds, "_timed", timed)
    record = speeds.prefill(models, 64)
    assert record["tokens_at_once"] == {"original": 24, "converted": 24}
    assert record["milliseconds"] == {"original": 2.0, "converted": 2.0}


def test_lengths_beyond_learned_positions_are_left_out():
    model = tiny("gpt2")
    end = model.config.max_position_embeddings
    models = {"original": model, "converted": convert(model, mechanisms(model), [(0, 1)])}
    found = [record for _, record in model_speeds(models, (20, end), (end, end + 1))]
    assert [(each["what"], each.get("n")) for each in found[1:]] == [("decode", 20), ("prefill", end)]
