"""Our reading of LoLCATs (arXiv 2410.10254), `rivals.lolcats.OPTIONS`, against what the paper states."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import attngap
from attngap.models.mixed import mixed_heads
from tests import zoo
from tests.benchmark.rival_models import sharp

SMALL = {"window": 16, "lora": 2, "context": 64, "tokens": 512, "measured": False, "quiet": True}


@pytest.fixture(scope="module")
def converted(rivals):
    """Without attention transfer, and with it."""
    words = zoo.tokenizer()
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=len(words), max_position_embeddings=256)
    model, options = sharp(LlamaForCausalLM(config).eval()), rivals.lolcats.OPTIONS | SMALL
    made = [attngap.linearize(model, words, **options, steps=steps, joint=3 * (steps > 0)) for steps in (0, 30)]
    return model, *made


@torch.no_grad()
def test_all_heads_are_softmax_in_a_window_and_hedgehog_features_beyond_under_one_normalizer(converted):
    _, _, (other, receipt) = converted
    assert receipt.kept == 0
    parts = mixed_heads(other)
    assert len(parts) == 2
    q, k, v = (torch.randn(1, heads, 40, 16) for heads in (4, 2, 2))
    turned = torch.ones(1, 40, 16), torch.zeros(1, 40, 16)
    for part in parts.values():
        m = part.mechanism
        assert (m.feature_map.name, m.window, m.sinks) == ("hedgehog", 16, 0)
        weights = m.weights(m.read(None, q, k, v, rotary=turned))
        assert weights.min() >= 0
        torch.testing.assert_close(weights.sum(-1), torch.ones(1, 4, 40))
        exact = (q @ k.repeat_interleave(2, 1).mT * m.scale).masked_fill(~torch.ones(40, 40).tril().bool(), -torch.inf)
        torch.testing.assert_close(weights[:, :, :16], exact.softmax(-1)[:, :, :16])  # nothing lies beyond the window
        near = torch.ones(40, 40).tril().triu(-15).bool()
        ratio = (weights.log() - exact)[0, :, 39][:, near[39]]  # softmax' own proportions inside of it
        torch.testing.assert_close(ratio, ratio[:, :1].expand_as(ratio), atol=1e-4, rtol=1e-4)


def test_attention_transfer_brings_outputs_nearer_to_softmax(converted):
    _, (_, before), (_, after) = converted
    assert after.fit_error["median"] < before.fit_error["median"]


def test_the_second_stage_trains_low_rank_weights_of_the_projections_only(converted):
    model, _, (other, _) = converted
    own = dict(model.named_parameters())
    low = {name for name, _ in other.named_parameters() if ".lora_" in name}
    assert {name.split(".")[4] for name in low} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    for name, p in other.named_parameters():
        if ".lora_" not in name and ".attngap." not in name:
            assert torch.equal(p, own[name.replace(".base_layer", "")]), name
