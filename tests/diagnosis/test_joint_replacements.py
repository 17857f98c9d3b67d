"""Real replacements inside a diagnosis: what they measure, on which passages, and that a killed run resumes them."""

import math

import pytest
import torch
from torch.nn.functional import cross_entropy, kl_div

from attngap.diagnosis import diagnose as diagnosing
from attngap.diagnosis import joint, replaced
from attngap.diagnosis.joint import SHARES, compare
from tests import zoo

TEXT = " ".join(f"{i} bottles of beer on the wall, {i} bottles of beer." for i in range(400))
OPTIONS = {"context": 48, "passages": 2, "ranks": (), "window": 6, "sinks": 2}


def run(**changes):
    return diagnosing.diagnose(zoo.tiny("llama"), zoo.tokenizer(), TEXT, **OPTIONS | changes)


@pytest.fixture(scope="module")
def found():
    return run()


def test_figures_are_those_of_torch():
    generator = torch.Generator().manual_seed(0)
    before, after = (torch.randn(9, 30, generator=generator).log_softmax(-1) for _ in range(2))
    tokens = torch.randint(30, (1, 9), generator=generator)
    measured = compare(before, after, tokens, period=4)
    assert measured["divergence"] == pytest.approx(kl_div(after, before, log_target=True, reduction="batchmean"))
    losses = [cross_entropy(x[:-1], tokens[0, 1:]).item() for x in (before, after)]
    assert measured["log_ratio"].item() == pytest.approx(losses[1] - losses[0], abs=1e-6)
    right = (after[:-1].argmax(-1) == tokens[0, 1:])[-4:]
    assert measured["recalled"] == right.float().mean()


def test_every_share_is_measured_on_two_passages_of_text_and_on_all_repeats(found):
    text, recall = ([row for row in found.joint if row.kind == kind] for kind in ("text", "recall"))
    assert len(text) == 2 * len(SHARES)
    assert len(recall) == joint.RECALL_PASSAGES * len(SHARES)
    assert {row.passage for row in text} == {0, 1, 2, 3}
    everything = [row for row in text if row.kept == 0]
    assert everything[0].damage == pytest.approx(sum(head.damage for head in found.heads))
    assert all(row.divergence > 0 and row.original is None for row in text)
    assert all(0 <= row.recalled <= 1 for row in recall)


def test_the_worst_heads_have_their_real_damage_on_recall(found, monkeypatch):
    """All eight are among the ten worst here. Measured again by hand on the same fresh passage."""
    assert all(head.recall_estimate is not None for head in found.heads)
    seen = {}

    def watch(run, heads):
        seen["run"] = run
        for head in heads[:2]:
            tokens = run.fresh_stress[0]
            before = joint.predictions(joint.forward(run.model, tokens))
            after = joint.replaced_predictions(run, tokens, {head.layer: [head.head]})
            seen[head.id] = kl_div(after, before, log_target=True, reduction="batchmean").item()

    monkeypatch.setattr(diagnosing, "measure_worst", watch)
    run()
    for head in found.heads[:2]:
        assert head.recall_damage == pytest.approx(seen[head.id], rel=1e-4)
    used = [*seen["run"].text.split(1), *seen["run"].more]
    assert not any(diagnosing._share(a[0], b[0]) for a in seen["run"].fresh for b in used)


def test_importance_goes_by_second_order_so_that_no_head_drowns_the_others(found):
    text, recall = (sum(getattr(h, name) for h in found.heads) for name in ("damage", "recall_estimate"))
    for head in found.heads:
        share = (head.damage / text + head.recall_estimate / recall) / 2
        assert head.importance == pytest.approx(share)


def test_what_remains_keeps_its_share_of_a_measured_damage():
    for head in run(ranks=(2, 4)).heads:
        assert head.recall_damage == pytest.approx(head.recall_unavoidable + head.recall_lost)
        assert 0 <= head.recall_unavoidable <= head.recall_damage * (1 + 1e-9)


def test_a_killed_run_does_not_replace_again(found, tmp_path, monkeypatch):
    plain, calls = joint.replaced_predictions, []

    def dies(*args, **kwargs):
        calls.append(1)
        if len(calls) == 12:
            raise KeyboardInterrupt
        return plain(*args, **kwargs)

    for module in (joint, replaced):
        monkeypatch.setattr(module, "replaced_predictions", dies)
    with pytest.raises(KeyboardInterrupt):
        run(directory=tmp_path)
    for module in (joint, replaced):
        monkeypatch.setattr(
            module, "replaced_predictions", lambda *args, **kwargs: calls.append(1) or plain(*args, **kwargs)
        )
    resumed = run(directory=tmp_path)
    assert resumed.joint == found.joint
    assert len(calls) == 8 + 4 * len(SHARES) + 1  # every replacement once, and the one that was killed


def test_encoders_and_texts_without_a_fresh_passage_predict_nothing():
    encoder = diagnosing.diagnose(zoo.tiny("bert"), zoo.tokenizer(True), TEXT, **OPTIONS)
    short = diagnosing.diagnose(zoo.tiny("llama"), zoo.tokenizer(), TEXT[:300], **OPTIONS)
    for result in (encoder, short):
        assert result.joint == []
        assert all(point.perplexity_ratio is None for point in result.plan(0.5).curve)
    assert any("no passage left" in note for note in short.notes)
    assert all(math.isfinite(head.recall_damage) and head.recall_estimate is None for head in short.heads)
