"""The choice of an encoder's heads, by counting and on a model of which one knows what is read."""

import pytest
import torch

from attngap.conversion.joint import Reference
from tests import zoo


@pytest.fixture
def encoder():
    model = zoo.tiny("bert")
    with torch.no_grad():
        for layer in model.base_model.encoder.layer:
            layer.attention.output.dense.weight.mul_(8)
    return model


def test_a_head_that_nothing_reads_is_the_last_to_be_kept(rivals, encoder):
    heads = encoder.config.num_attention_heads
    size = encoder.config.hidden_size // heads
    with torch.no_grad():
        encoder.base_model.encoder.layer[0].attention.output.dense.weight[:, :size] = 0
    every = [(layer, head) for layer in range(encoder.config.num_hidden_layers) for head in range(heads)]
    found = rivals.encoders.ablation(encoder, zoo.tokens(2, 24), every)
    assert found[0, 0] == pytest.approx(0, abs=1e-6)
    assert min(value for at, value in found.items() if at != (0, 0)) > 1e-5


def test_entropy_is_that_of_the_weights_transformers_hands_out(rivals, encoder):
    tokens = zoo.tokens(2, 24)
    found = rivals.encoders.entropy(encoder, tokens)
    encoder.set_attn_implementation("eager")
    with torch.no_grad():
        weights = encoder(input_ids=tokens, output_attentions=True).attentions
    for (layer, head), value in found.items():
        rows = torch.special.entr(weights[layer][:, head]).sum(-1)
        assert value == pytest.approx(float(rows.mean()), rel=1e-4)


def test_all_heads_kept_turn_nothing_and_shares_are_counted(rivals, encoder, monkeypatch):
    monkeypatch.setattr(rivals.encoders, "SHARES", (0.5, 1.0))
    tokens, asked = zoo.tokens(2, 24), zoo.tokens(3, 24, seed=1)
    mechanisms = zoo.mechanisms(encoder, "elu")
    rows = rivals.encoders.compare(encoder, mechanisms, Reference(encoder, tokens), tokens, asked)
    total = sum(m.heads for m in mechanisms.values())
    assert {row["score"] for row in rows} == {"our", "entropy", "ablation", "random"}
    for row in rows:
        assert row["kept"] == round(row["share"] * total)
        assert row["turned"] == pytest.approx(0, abs=1e-6) or row["share"] < 1
    whole = {row["score"]: row["turned"] for row in rows if row["share"] == 0}
    assert len(set(whole.values())) == 1  # nothing kept is the same whatever the score
    assert next(iter(whole.values())) > 1e-5
