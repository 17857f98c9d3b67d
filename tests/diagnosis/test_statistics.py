"""Streamed statistics equal what `output_attentions=True` gives by brute force, on seven families."""

import math

import pytest
import torch

from attngap.diagnosis.statistics import measure
from attngap.diagnosis.survey import summary, survey
from attngap.heads.inputs import layer_inputs
from attngap.models.capture import capture
from attngap.theory.certificates import selection
from tests import zoo

FAMILIES = sorted(zoo.FAMILIES)
NEAR = {"window": 5, "sinks": 2}
LENGTH, PERIOD = 33, 16


def eager_weights(model, ids, mask=None):
    """(self, cross): lists of (b, h, t, s), in the order of the calls."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(**zoo.inputs(model, ids, mask), output_attentions=True)
    model.set_attn_implementation("sdpa")
    if model.config.is_encoder_decoder:
        return [*out.encoder_attentions, *out.decoder_attentions], list(out.cross_attentions)
    return list(out.attentions), []


def streamed(model, ids, mask=None, **options):
    """The same order: [self calls], [cross calls], each a list over the batch."""
    found = {False: [], True: []}

    def watch(call):
        period = None if call.cross else PERIOD
        found[call.cross].append([measure(one, **NEAR, period=period, **options) for one in layer_inputs(call)])

    with torch.no_grad(), capture(model, watch):
        model(**zoo.inputs(model, ids, mask))
    return found[False], found[True]


def brute(weights: torch.Tensor) -> dict[str, torch.Tensor]:
    """Every statistic of one sequence's (h, t, s) weights, a row at a time in float64."""
    weights = weights.double()
    h, t, s = weights.shape
    out = {name: torch.full((h, t), math.nan, dtype=torch.float64) for name in ("entropy", "top", "sink", "near")}
    for name in ("previous", "duplicate", "induction"):
        out[name] = torch.zeros(h, t, dtype=torch.float64)
    for i in range(t):
        row = weights[:, i]
        n = int((row.amax(0) > 0).sum())
        if n > 1:
            out["entropy"][:, i] = -torch.special.xlogy(row, row).sum(-1) / math.log(n)
        out["top"][:, i] = row.amax(-1)
        out["sink"][:, i] = row[:, :2].sum(-1)
        near = [j for j in range(2, s) if abs(i - j) < 5]
        out["near"][:, i] = row[:, near].sum(-1)
        for name, back in (("previous", 1), ("duplicate", PERIOD), ("induction", PERIOD - 1)):
            if 0 <= i - back < s:
                out[name][:, i] = row[:, i - back]
    chosen = selection(weights.log(), sinks=2)
    return out | {"kappa": chosen.kappa, "margin": chosen.margin, "on_sink": chosen.on_sink}


def check(rows, expected, names):
    for name in names:
        found, wanted = getattr(rows, name).double(), expected[name].double()
        assert torch.allclose(found, wanted, atol=2e-4, rtol=2e-4, equal_nan=True), name


ROWS = ("entropy", "top", "sink", "near", "kappa", "margin", "on_sink")


@pytest.mark.parametrize("family", FAMILIES)
def test_equal_to_brute_force(family):
    model, ids = zoo.tiny(family), zoo.tokens(2, LENGTH)
    own, cross = eager_weights(model, ids)
    found, found_cross = streamed(model, ids)
    assert len(own) == len(found)
    assert len(cross) == len(found_cross) == (2 if family == "t5" else 0)
    for layer, weights in enumerate(own):
        for i in range(2):
            check(found[layer][i], brute(weights[i]), (*ROWS, "previous", "duplicate", "induction"))
    for layer, weights in enumerate(cross):
        for i in range(2):
            check(found_cross[layer][i], brute(weights[i]), ("entropy", "top", "kappa", "margin"))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_equals_unpadded_sequences(family, side):
    if family in ("gpt2", "bert", "albert") and side == "left":
        pytest.skip("absolute positions count padding on the left, so the model itself computes something else")
    model, real = zoo.tiny(family), 21
    ids = zoo.tokens(2, LENGTH)
    mask = torch.ones_like(ids)
    mask[1, real:] = 0
    if side == "left":
        mask = mask.flip(1)
    alone = ids[1:, mask[1].bool()]
    together, _ = streamed(model, ids, mask)
    separate, _ = streamed(model, alone)
    for layer in range(len(separate)):
        for name in ROWS:
            a, b = getattr(together[layer][1], name), getattr(separate[layer][0], name)
            assert a.shape[-1] == real
            assert torch.allclose(a, b, atol=1e-3, rtol=1e-3, equal_nan=True), (layer, name)


@pytest.mark.parametrize("family", ["llama", "sliding", "t5", "bert"])
@pytest.mark.parametrize("block", [1, 7 * LENGTH, 1000, 12345])
def test_any_block_size_gives_the_same(family, block):
    model, ids = zoo.tiny(family), zoo.tokens(1, LENGTH)
    whole, _ = streamed(model, ids)
    pieces, _ = streamed(model, ids, block=block)
    for layer in range(len(whole)):
        for name in (*ROWS, "spread", "induction"):
            a, b = getattr(whole[layer][0], name), getattr(pieces[layer][0], name)
            assert torch.allclose(a, b, atol=1e-4, rtol=1e-4, equal_nan=True), name


@pytest.mark.parametrize("family", ["llama", "sliding", "t5", "bert"])
def test_spread_is_the_top_logit_above_the_mean(family):
    model, ids = zoo.tiny(family), zoo.tokens(1, LENGTH)
    calls = []
    with torch.no_grad(), capture(model, calls.append):
        model(**zoo.inputs(model, ids))
    for call in calls:
        (one,) = layer_inputs(call)
        rows = measure(one, **NEAR)
        logits = one.logits(slice(0, one.length), slice(0, one.k.shape[0])).double()
        allowed = logits > -1e29
        mean = logits.masked_fill(~allowed, 0).sum(-1) / allowed.sum(-1)
        assert torch.allclose(rows.spread.double(), logits.amax(-1) - mean, atol=1e-4)
        assert torch.allclose(one.weights() @ one.v.repeat_interleave(one.group, 0), call.output[0], atol=1e-5)


def test_memory_beyond_the_result_does_not_grow_with_the_square_of_the_length(monkeypatch):
    """The largest logits that exist at a time stay within the block, whatever the length."""
    from attngap.heads.inputs import LayerInputs

    sizes = []
    plain = LayerInputs.logits
    monkeypatch.setattr(LayerInputs, "logits", lambda self, rows, kv: sizes.append(plain(self, rows, kv)) or sizes[-1])
    for t in (256, 1024):
        one = LayerInputs(torch.randn(4, t, 8), torch.randn(2, t, 8), torch.randn(2, t, 8), True)
        measure(one, **NEAR, block=2**14)
    assert max(logits.numel() for logits in sizes) <= 2**14


def test_summary_takes_quantiles_over_rows_that_do_not_look_at_sinks():
    t = 64
    torch.manual_seed(1)
    one = tiny_sequence(t)
    found = survey(one, **NEAR)
    total = summary([found])
    chosen = selection(one.weights().log(), sinks=2)
    wanted = chosen.summary()
    assert torch.allclose(total["kappa"].double(), wanted["kappa"], atol=1e-4)
    assert torch.allclose(total["kappa_p90"].double(), wanted["kappa_p90"], atol=1e-4)
    assert torch.allclose(total["selecting"].double(), wanted["selecting"], atol=1e-6)
    assert torch.allclose(total["far"], 1 - total["sink"] - total["near"], atol=1e-6)


def test_a_sharper_head_has_a_larger_entry_size():
    soft, sharp = tiny_sequence(64, 0.5), tiny_sequence(64, 4.0)
    assert (survey(sharp, **NEAR)["entry"] > survey(soft, **NEAR)["entry"]).all()


def tiny_sequence(t: int, size: float = 1.0):
    from attngap.heads.inputs import LayerInputs

    torch.manual_seed(0)
    return LayerInputs(torch.randn(4, t, 8) * size, torch.randn(2, t, 8), torch.randn(2, t, 8), True)
